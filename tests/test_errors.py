"""Every error of the program has a code, and every code an error."""

import ast
import pickle

import pytest
from support.project import REPOSITORY

from sharmill.errors import CODES, ConfigError, DamagedShard, FatalError, UnitFailed

SOURCES = ("src/sharmill", "jobs", "pipelines", "examples")
# A damaged shard has the code of its class.
NEED_A_CODE = {kind.__name__ for kind in (ConfigError, FatalError, UnitFailed)}


def calls():
    """Each call of an error's class in the program: its place, the name of the class, and its arguments by name."""
    for path in sorted(path for folder in SOURCES for path in (REPOSITORY / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.Call):
                name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
                if name in NEED_A_CODE | {"DamagedShard"}:
                    place = f"{path.relative_to(REPOSITORY)}:{node.lineno}"
                    yield place, name, {keyword.arg: keyword.value for keyword in node.keywords}


def test_every_error_has_a_code():
    without = [place for place, name, given in calls() if name in NEED_A_CODE and "code" not in given]
    assert without == []


def test_codes_in_the_program_are_listed():
    written = {given["code"].value for _, _, given in calls() if isinstance(given.get("code"), ast.Constant)}
    assert written <= CODES.keys()


@pytest.mark.parametrize("kind", [ConfigError, FatalError, UnitFailed, DamagedShard])
def test_an_error_keeps_its_code_between_processes(kind):
    error = pickle.loads(pickle.dumps(kind("a sentence", code="locked")))
    assert (type(error), str(error), error.code) == (kind, "a sentence", "locked")
