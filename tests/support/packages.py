"""Packages that are installed beside sharmill, as pip leaves them."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from support.paths import TESTS


def add_distribution(site: Path, name: str, version: str, entry_points: str = "") -> None:
    """Writes the metadata of a distribution into a folder, or of another version of it."""
    folder = site / f"{name.replace('-', '_')}-0.dist-info"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (folder / "entry_points.txt").write_text(entry_points)


def install(patch: pytest.MonkeyPatch, site: Path, package: str, version: str | None = None) -> None:
    """Installs a package of ``tests/plugins``, whose metadata lie in the folder ``site`` then."""
    project = tomllib.loads((TESTS / "plugins" / package / "pyproject.toml").read_text())["project"]
    groups = project["entry-points"].items()
    texts = [f"[{group}]\n" + "".join(f"{name} = {at}\n" for name, at in named.items()) for group, named in groups]
    add_distribution(site, project["name"], version or project["version"], "\n".join(texts))
    for folder in (site, TESTS / "plugins" / package):
        patch.syspath_prepend(str(folder))
