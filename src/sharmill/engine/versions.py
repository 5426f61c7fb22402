"""Versions of the libraries that output bytes depend on, for plan identities."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

import sharmill


def versions(*packages: str) -> dict[str, str]:
    """Return the installed version of sharmill and of each package; ``absent`` where there is none."""
    found = {"sharmill": sharmill.__version__}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "absent"
    return found
