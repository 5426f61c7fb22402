"""sharmill: speech manifests to training-ready Lhotse Shar datasets, on one machine or a cluster."""

import os
import pwd

__version__ = "0.1.0"

try:
    pwd.getpwuid(os.getuid())
except KeyError:
    # In a container whose user id has no name, torch and lhotse cannot be imported unless a user name and a home folder
    # are set. USERNAME is the last variable that Python tries, and "/" is Docker's default home folder.
    os.environ.setdefault("USERNAME", f"user{os.getuid()}")
    os.environ.setdefault("HOME", "/")
