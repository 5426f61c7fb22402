"""Starts a Ray worker beside a head on 127.0.0.1, with the arguments of ``ray``: for trials on one host.

Ray replaces 127.0.0.1 by an address that others can reach, and then listens everywhere. Where it takes itself for a
cluster of one machine (RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=0, which ray.sbatch sets) it stays on 127.0.0.1, but refuses a
second node. Only private names of Ray allow that; they were tried with Ray 2.60.
"""

from ray._private import ray_constants, services
from ray.scripts.scripts import main

if __name__ == "__main__":
    ray_constants.ENABLE_RAY_CLUSTER = True
    services.resolve_ip_for_localhost = lambda host: host
    main()
