"""``make venv``: it announces its steps, uses uv, and falls back to pip with a message. CI tests real installation."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from support.project import REPOSITORY

# A Python stub that creates an environment of programs which record their calls and fail on request.
PYTHON = """#!/bin/sh
if [ "$1" = -VV ]; then echo Python 3.fake; exit 0; fi
if [ "$2" != venv ]; then exit 0; fi
mkdir -p "$3/bin"
cat > "$3/bin/python" <<'END'
#!/bin/sh
echo "python $*" >> "$CALLS"
case "$*" in
*" uv") if [ -n "$NO_UV" ]; then echo "ERROR: $NO_UV" >&2; exit 1; fi; cp "$FAKE_UV" "$(dirname "$0")/uv";;
esac
END
chmod +x "$3/bin/python"
"""
UV = """#!/bin/sh
echo "uv $*, backend: $UV_TORCH_BACKEND" >> "$CALLS"
exit ${UV_STATUS:-0}
"""


@pytest.fixture
def checkout(tmp_path) -> Path:
    """Files of the repository that ``make venv`` reads, and a Python stub that installs nothing."""
    folder = tmp_path / "checkout"
    shutil.copytree(REPOSITORY / ".ci", folder / ".ci")
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(REPOSITORY / name, folder)
    for name, text in {"python": PYTHON, "uv": UV}.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    return folder


def make(checkout: Path, **environment: str) -> tuple[int, str, list[str]]:
    """Run ``make venv``; return its exit status, its output, and the calls that it makes."""
    outside = checkout.parent
    calls = outside / "calls"
    calls.unlink(missing_ok=True)
    given = {"PYTHON": str(outside / "python"), "FAKE_UV": str(outside / "uv"), "CALLS": str(calls)}
    environment = {"PATH": os.environ["PATH"], "UV_TORCH_BACKEND": "cpu"} | given | environment
    done = subprocess.run(["make", "venv"], cwd=checkout, env=environment, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr, calls.read_text().splitlines() if calls.exists() else []


@pytest.mark.parametrize(("problem", "last"), [("", "uv pip install"), ("no network", "python -m pip install")])
def test_setup_announces_its_size_and_falls_back_to_pip(checkout, problem, last):
    status, said, calls = make(checkout, NO_UV=problem)
    assert status == 0, said
    assert "Python packages" in said.splitlines()[0]
    assert "GB" in said
    assert problem in said
    assert ("installing with pip" in said) == bool(problem)
    assert calls[-1].startswith(last)
    assert "--constraint constraints.txt --editable .[test,lint]" in calls[-1]


def test_it_is_done_once_and_again_when_a_requirement_changes(checkout):
    assert make(checkout)[2]
    assert make(checkout) == (0, "", [])
    with (checkout / "constraints.txt").open("a") as constraints:
        constraints.write("another==1.0\n")
    assert make(checkout)[2]


def test_what_failed_half_way_is_done_again(checkout):
    (checkout.parent / "uv").write_text("#!/bin/sh\nexit 2\n")
    python = checkout.parent / "python"
    python.write_text(python.read_text().replace("esac", "*editable*) exit 1;;\nesac"))
    assert make(checkout)[0] != 0
    assert make(checkout)[2]
