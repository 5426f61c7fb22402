"""Files of others are opened in few places, which know what they open; this walks the code for openings beside them."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from support.paths import REPOSITORY

SOURCE = REPOSITORY / "src/sharmill"
# Calls that open a file for reading, whatever they are called on.
OPENING = {"open", "read_bytes", "read_text", "fdopen", "memmap", "fromfile", "loadtxt", "genfromtxt", "mmap"}
# Those whose first argument is a name or a stream.
LOADING = {("np", "load"), ("numpy", "load"), ("torch", "load"), ("sf", "SoundFile"), ("soundfile", "read")}

CHECKS = "looks at what it opens: kind, size, links"
OWN = "opens a file that it has just made, or one for writing"
SYSTEM = "a file of the system, or of the package itself"
OPENED = "reads what a checked opener gave it, or bytes in memory"
INPUT = "an input that the user names; its source has checked that it is a regular file"
MODEL = "a model that the user names; its archive and classes are checked"
OF_THE_RUN = "a file of the run directory, in a folder that is refused where it is a link"

# A function, a file, or a folder.
ALLOWED = {
    "audio/": "audio, opened by open_audio of audio/files.py, or from what that has opened",
    "collect/recipes.py": INPUT,
    "collect/stage.py:_publish_recipe_log": OF_THE_RUN,
    "config/limits.py:check_yaml": CHECKS,
    "demo/": OWN,
    "engine/fence.py:_create": OWN,
    "engine/locks.py:_enter": OWN,
    "engine/stored.py:map_stored_array": OPENED,
    "engine/worker.py:_open": "opens a stage, not a file",
    "executors/machine.py:_examine_folder": OWN,
    "export/run.py:export_dataset": "opens a shard, not a file",
    "models/": MODEL,
    "processes.py": SYSTEM,
    "report/page.py:make_page": SYSTEM,
    "shar/reading/decoding.py": OPENED,
    "shar/reading/iteration.py:_read": "opens a shard, not a file",
    "shar/reading/random_access.py:__init__": OPENED,
    "shar/tar.py:__init__": OPENED,
    "sources/": INPUT,
    "storage.py:checksum": "of a file that was found to be regular, in blocks",
    "storage.py:fsync_directory": OWN,
    "storage.py:fsync_file": OWN,
    "storage.py:open_regular": CHECKS,
    "training/": "measures of this machine, and files of the user's own configuration",
}


def is_allowed(place: str) -> bool:
    return any(place == known or place.startswith(f"{known}:") or (known.endswith("/") and place.startswith(known))
               for known in ALLOWED)  # fmt: skip


def openings() -> Iterator[str]:
    """Yield ``file:function`` of every call that may open a file for reading."""
    for path in sorted(SOURCE.rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        yield from _walk(tree, path.relative_to(SOURCE).as_posix(), "")


def _walk(node: ast.AST, file: str, function: str) -> Iterator[str]:
    for child in ast.iter_child_nodes(node):
        inside = child.name if isinstance(child, ast.FunctionDef) else function
        if isinstance(child, ast.Call) and _opens(child):
            yield f"{file}:{inside}"
        yield from _walk(child, file, inside)


def _opens(call: ast.Call) -> bool:
    target = call.func
    if isinstance(target, ast.Name):
        return target.id in OPENING
    if not isinstance(target, ast.Attribute):
        return False
    owner = target.value.id if isinstance(target.value, ast.Name) else ""
    if (owner, target.attr) in LOADING:
        return True
    modes = [argument.value for argument in call.args if isinstance(argument, ast.Constant)]
    writes = any(isinstance(mode, str) and mode in ("wb", "ab", "xb", "w") for mode in modes)
    return target.attr in OPENING and not writes


def test_every_opening_is_a_known_one():
    unknown = sorted(place for place in set(openings()) if not is_allowed(place))
    assert not unknown, (
        "open files of others with sharmill.storage.open_regular, sharmill.engine.stored or open_field, or "
        f"add the place to ALLOWED with the reason: {unknown}"
    )


def test_every_allowed_place_is_there_and_has_a_reason():
    places = "\n".join(openings())
    assert [known for known in ALLOWED if known not in places] == []


def test_a_new_opening_is_found():
    code = "def f(path):\n    path.open('rb')\n    np.load(path)\n    path.open('wb')\nx = open('y')\n"
    assert list(_walk(ast.parse(code), "a.py", "")) == ["a.py:f", "a.py:f", "a.py:"]
