"""Rows of what passes before any work is done."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from bench.rows import Case, row


def _run(*arguments: str) -> None:
    subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL)


@row("start help", baseline="an empty Python", target="≤ 0.2 s")
def help_page(folder: Path, tiny: bool) -> Case:
    """The wall time of ``sharmill --help``."""
    return Case(
        amount=1, unit="starts", by="wall",
        ours=lambda: _run("-m", "sharmill", "--help"), baseline=lambda: _run("-c", "pass"),
    )  # fmt: skip
