"""Ports: the few functions through which a run knows of time, of its own process and of others of its machine.

They are called through their modules, as ``clock.sleep(1.0)``, so that a simulation of a whole cluster in one process
can put its own in their place. What SLURM is asked for goes through ``executors.slurm.scheduler`` in the same way. File
operations need no port: Python reports each of them to audit hooks (PEP 578).
"""
