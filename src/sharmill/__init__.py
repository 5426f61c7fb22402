"""sharmill: speech manifests to training-ready Lhotse Shar datasets, on one machine or a cluster."""

import os
import pwd

__version__ = "0.1.0"

try:
    pwd.getpwuid(os.getuid())
except KeyError:
    # In a container that runs as a bare number, torch and lhotse fail at their import for want of a name and a home.
    # The name is the last one that Python looks at, and the home that of Docker.
    os.environ.setdefault("USERNAME", f"user{os.getuid()}")
    os.environ.setdefault("HOME", "/")
