"""Imports that the ranks of one machine share: the process that they are forked from makes them once.

A module that cannot be imported is left out, so that the rank which needs it meets the error and reports it.
"""

from __future__ import annotations

import importlib
import os
import sys
from contextlib import suppress
from typing import Final

MODULES: Final = "SHARMILL_PRELOAD"
PATH: Final = "SHARMILL_PRELOAD_PATH"

# Otherwise torch asks CUDA itself whether there are GPUs, after which no forked process can use them.
os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
# The server of multiprocessing begins without the places that the process which starts it has added.
sys.path += [entry for entry in os.environ.get(PATH, "").split(os.pathsep) if entry not in sys.path]
for name in os.environ.get(MODULES, "").split():
    with suppress(Exception, SystemExit):
        importlib.import_module(name)
