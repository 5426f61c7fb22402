"""The generated pages say what the code says."""

from __future__ import annotations

import subprocess
import sys

from support.paths import REPOSITORY


def test_generated_pages_are_up_to_date():
    script = REPOSITORY / "docs" / "generate.py"
    done = subprocess.run([sys.executable, str(script), "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
