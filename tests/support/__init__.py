"""Manufactured data, toy stages and drivers of processes, shared by the tests and the benchmarks.

``tests`` is on the path of the tests (pyproject.toml) and of every process that they start (conftest.py), so that ranks
can import what is here.
"""

import os

# Threads of torch that wait for others leave the cores to other tests, in ranks too; torch reads it when imported.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
