"""Imports that forked processes share, made by the server that they are forked from when it starts.

A module that cannot be imported is left out, so that the process which needs it meets the error and reports it.
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
    # The forked processes meet the same, and it is told; a terminal gets one line.
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
# Otherwise torch asks CUDA itself whether there are GPUs, after which no forked process can use them.
os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
# The server begins without the places that the process which starts it has added.
sys.path += [entry for entry in path if entry not in sys.path]
for name in modules:
    with suppress(Exception, SystemExit):
        importlib.import_module(name)
