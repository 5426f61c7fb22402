"""The page on configuration says what the dataclasses say."""

from __future__ import annotations

import subprocess
import sys

from support.paths import REPOSITORY


def test_the_page_is_up_to_date():
    script = REPOSITORY / "docs" / "generate_configuration.py"
    done = subprocess.run([sys.executable, str(script), "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
