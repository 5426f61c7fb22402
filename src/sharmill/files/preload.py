"""Imports for a server that shares them with the processes forked from it.

A module that cannot be imported is skipped; the process that needs it will report the error.
"""

import importlib
import json
import os
import sys
from contextlib import suppress
from pathlib import Path

from sharmill.errors import SharmillError
from sharmill.files.forks import PRELOAD, become_server
from sharmill.files.output import redirect_output

parent, modules, path, log = json.loads(os.environ.pop(PRELOAD))
become_server(parent)
try:
    if log is not None:
        redirect_output(Path(log))
except SharmillError:
    # The forked processes will report the same error, so discard the output of this process to show the error only
    # once.
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
# Make torch look for GPUs through NVML. If it initialized CUDA in this process, no forked process could use the GPUs.
os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
# The server starts without the search paths that the starting process has added.
sys.path += [entry for entry in path if entry not in sys.path]
for name in modules:
    with suppress(Exception, SystemExit):
        importlib.import_module(name)
