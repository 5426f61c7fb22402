"""Start a Ray worker whose head listens on 127.0.0.1, for tests on one host; the arguments are those of ``ray``.

By default, Ray replaces 127.0.0.1 with a reachable address, and then listens on all addresses. In the mode for a single
machine (RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=0, set by ray.sbatch), it stays on 127.0.0.1 but refuses a second node. That
can only be changed through private names of Ray; this script was tested with Ray 2.60.
"""

from ray._private import ray_constants, services
from ray.scripts.scripts import main

if __name__ == "__main__":
    ray_constants.ENABLE_RAY_CLUSTER = True
    services.resolve_ip_for_localhost = lambda host: host
    main()
