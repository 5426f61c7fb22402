"""Files of others are opened in few places, which know what they open; this walks the code for openings beside them."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from support.paths import REPOSITORY

SOURCE = "src/sharmill"
FOLDERS = (SOURCE, "jobs", "pipelines", "examples")
# Calls that open a file for reading or appending, whatever they are called on.
OPENING = {
    "open", "read_bytes", "read_text", "fdopen", "memmap", "fromfile", "loadtxt", "genfromtxt", "mmap", "memory_map",
    "FileHandler", "ParquetFile", "OSFile", "SoundFile", "ZipFile", "safe_open", "load_file", "checksum",
    "from_pretrained", "restore_from",
}  # fmt: skip
# Those that are openings on these alone.
LOADING = {
    ("np", "load"), ("numpy", "load"), ("torch", "load"), ("sf", "read"), ("soundfile", "read"), ("sf", "info"),
    ("soundfile", "info"), ("OmegaConf", "load"), ("shutil", "copy"), ("shutil", "copy2"), ("shutil", "copyfile"),
    ("shutil", "copytree"), ("shutil", "move"),
}  # fmt: skip
NEW = ("wb", "w", "xb", "x")

CHECKS = "looks at what it opens: kind, size, links"
OWN = "opens a file that it has just made, under a name of its own, or below its plan's token"
LINK = "is opened without following a link"
SYSTEM = "a file of the system"
PACKAGE = "a file of the package"
OPENED = "reads what a checked opener gave it, or bytes in memory"
LOOKED = "was opened by a checked opener a moment before, which found a regular file"
MODEL = "a model that the user names; its archive and classes are checked"
USER = "a file of the user's own, who names it"
EXAMPLE = "an example: a file that its own command line names"
NO_FILE = "opens no file"
INDEX = "a file that the index names, which was found to be a regular one below the dataset"
INPUT = "an input that the user names; checksum opens regular files only"

# A function, by its file, and the reason; nothing wider.
ALLOWED = {
    "audio/ffmpeg.py:_open": OPENED,
    "audio/row_files.py:__init__": LOOKED,
    "collect/corpora.py:_logging_warnings": OWN,
    "collect/recipes.py:read_an4": "a text of a corpus that the user names, in a folder of lhotse's recipe",
    "config/limits.py:check_yaml": CHECKS,
    "config/loading.py:_read_merged": "after check_yaml, which has looked at it",
    "demo/corpus.py:_find_finished": "the mark of a corpus that the demo has made, beside it",
    "demo/corpus.py:_rules": PACKAGE,
    "demo/defects.py:make": OWN,
    "demo/voices.py:write_audio": OWN,
    "encode/assemble.py:process": INDEX,
    "encode/survey.py:process": INDEX,
    "engine/locks.py:_enter": LINK,
    "engine/stored.py:map_stored_array": OPENED,
    "engine/worker.py:_open": NO_FILE,
    "executors/machine.py:_examine_folder": OWN,
    "export/run.py:export_dataset": NO_FILE,
    "grow/split.py:_checked": INDEX,
    "models/families.py:refuse_packed_weights": OPENED,
    "models/device.py:driver_version": SYSTEM,
    "models/hub.py:ask": "asks the hub for an address, by https",
    "models/memory.py:_resident": SYSTEM,
    "models/nemo_checkpoint.py:_restore": MODEL,
    "models/nemo_config.py:_read_archive": MODEL,
    "models/resemblyzer_encoder.py:_read_weights": "the weights in the package resemblyzer, as tensors alone",
    "models/shipped_codecs.py:load_builtin_codec": PACKAGE,
    "models/shipped_codecs.py:load_untrained_codec": PACKAGE,
    "models/transformers_codec.py:_from_pretrained": MODEL,
    "pilot/small_run.py:run_small": "links to copies that this run has fetched",
    "processes.py:_cores_of_groups": SYSTEM,
    "processes.py:control_groups": SYSTEM,
    "ports/process.py:state_and_start": SYSTEM,
    "ports/process.py:this_kernel": SYSTEM,
    "report/facts.py:index_checksum": INDEX,
    "report/page.py:make_page": PACKAGE,
    "shar/dataset.py:_is_in_place": INDEX,
    "shar/reading/decoding.py:_decode_anything": OPENED,
    "shar/reading/iteration.py:_read": NO_FILE,
    "shar/reading/memory_audio.py:_header": OPENED,
    "shar/reading/random_access.py:__init__": OPENED,
    "shar/rebuild.py:_record": INDEX,
    "shar/tar.py:_load": OPENED,
    "sources/annotated.py:identity": INPUT,
    "sources/files.py:identify_files": INPUT,
    "sources/lhotse_shar.py:identity": INPUT,
    "sources/lhotse_shar.py:read": NO_FILE,
    "sources/webdataset.py:_record_of": NO_FILE,
    "sources/wenet.py:_record_of": NO_FILE,
    "staging.py:_open_folder": LINK,
    "staging.py:publish": OWN,
    "storage.py:fsync_directory": OWN,
    "storage.py:fsync_file": OWN,
    "storage.py:open_regular": CHECKS,
    "training/buckets/mixture.py:_copy_lines": OWN,
    "training/buckets/nemo_step.py:_restore": "a model that the user names, opened by NeMo, which checks no classes",
    "training/buckets/step_process.py:_cause_of_death": OWN,
    "training/buckets/step_process.py:_left_in_groups": SYSTEM,
    "training/buckets/step_process.py:_limit_memory": NO_FILE,
    "training/buckets/step_process.py:_run_steps": SYSTEM,
    "training/buckets/step_process.py:available_memory": SYSTEM,
    "training/yaml_files.py:read_yaml": OPENED,
    "validate/accounts.py:identity": INPUT,
    "validate/stage.py:_index": INDEX,
    "jobs/launch_training.py:launch": OWN,
    "jobs/start_ranks.py:hand_on": SYSTEM,
    "jobs/train.py:_run_steps": NO_FILE,
    "jobs/train.py:_validate": NO_FILE,
    "jobs/train_checkpoints.py:_facts_of": OWN,
    "jobs/train_checkpoints.py:read_record": OWN,
    "jobs/train_progress.py:__init__": OWN,
    "examples/codecs/snac_codec.py:__init__": EXAMPLE,
    "examples/codecs/xcodec2_codec.py:__init__": EXAMPLE,
    "examples/conversations.py:read_conversations": EXAMPLE,
    "examples/measure_codec.py:code_with_opus": OPENED,
    "examples/measure_codec.py:main": EXAMPLE,
    "examples/own_source.py:read": EXAMPLE,
    "examples/read_with_lhotse.py:main": EXAMPLE,
    "examples/train.py:main": EXAMPLE,
    "examples/train_builtin_codec.py:make_model": EXAMPLE,
    "examples/train_builtin_codec.py:read_speech": EXAMPLE,
    "examples/train_builtin_codec.py:save": EXAMPLE,
}


def openings() -> Iterator[str]:
    """Yield ``file:function`` of every call that may open a file for reading or appending."""
    for folder in FOLDERS:
        for path in sorted((REPOSITORY / folder).rglob("*.py")):
            tree = ast.parse(path.read_text(encoding="utf-8"))
            root = REPOSITORY / SOURCE if folder == SOURCE else REPOSITORY
            yield from _walk(tree, path.relative_to(root).as_posix(), "")


def _walk(node: ast.AST, file: str, function: str) -> Iterator[str]:
    for child in ast.iter_child_nodes(node):
        inside = child.name if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)) else function
        if isinstance(child, ast.Call) and _opens(child):
            yield f"{file}:{inside}"
        yield from _walk(child, file, inside)


def _opens(call: ast.Call) -> bool:
    target = call.func
    modes = [argument.value for argument in (*call.args, *(key.value for key in call.keywords if key.arg == "mode"))
             if isinstance(argument, ast.Constant)]  # fmt: skip
    writes = any(isinstance(mode, str) and mode in NEW for mode in modes)
    if isinstance(target, ast.Name):
        return target.id in OPENING and not writes
    if not isinstance(target, ast.Attribute):
        return False
    owner = target.value.id if isinstance(target.value, ast.Name) else ""
    return (owner, target.attr) in LOADING or (target.attr in OPENING and not writes)


def test_every_opening_is_a_known_one():
    unknown = sorted(set(openings()) - ALLOWED.keys())
    assert not unknown, (
        "open files of others with sharmill.storage.open_regular, sharmill.engine.stored or open_field, or "
        f"add the place to ALLOWED with the reason: {unknown}"
    )


def test_every_allowed_place_is_there():
    assert sorted(ALLOWED.keys() - set(openings())) == []


def test_a_new_opening_is_found():
    code = """
def f(path):
    path.open('rb'), np.load(path), path.open('ab'), path.open(mode='a'), OmegaConf.load(path), sf.info(path)
    logging.FileHandler(path), shutil.copyfile(path, to), pq.ParquetFile(path), checksum(path)
    path.open('wb'), path.open(mode='xb'), open(path, 'w'), shutil.copyfileobj(one, other)
x = open('y')
"""
    assert list(_walk(ast.parse(code), "a.py", "")) == ["a.py:f"] * 10 + ["a.py:"]
