"""Export of a dataset, shard by shard: each folder of a shard is published as a whole, the manifest last.

What a form of export is made of lies in a module of its own, which ``sharmill.registry.EXPORTS`` names.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

import msgspec

from sharmill.errors import ConfigError, FatalError
from sharmill.files.locks import LOCK_NAME, FolderLock
from sharmill.files.storage import (
    disk_errors,
    make_folder,
    open_atomic,
    open_regular,
    path_aside,
    publish_directory,
    refuse_strangers,
    remove_asides,
    remove_tree,
    write_atomic,
)
from sharmill.files.stored import NOT_JSON
from sharmill.inspect.export import choose_codec
from sharmill.registry import EXPORTS
from sharmill.shar.cut_lines import read_lines
from sharmill.shar.index import CodecRecord, DatasetRecord, audio_checksum, read_dataset, read_shards
from sharmill.shar.layout import CUTS
from sharmill.shar.reading.shard_source import ReadableShard, open_shard_source

# The record of what a folder is an export of, and within the folder of each shard the lines of its manifest.
EXPORT_FILE: Final = "export.json"
_MAX_IDENTITY_BYTES: Final = 1 << 20
_LINES_FILE: Final = "lines.jsonl"
_SHARDS_FOLDER: Final = "shards"


class Export(Protocol):
    """One form of files that a dataset can be exported to; ``sharmill.registry.EXPORTS`` lists them.

    Attributes:
        version: a number that is raised whenever the files of this form change.
        manifest: the name of the file that lists all cuts.
        fields: of the cuts, those that are read.
    """

    version: int
    manifest: str
    fields: tuple[str, ...]

    def __init__(self, record: DatasetRecord, codec: CodecRecord) -> None: ...

    def write_cut(self, cut: Any, number: int, folder: Path, final: Path) -> dict[str, Any]:
        """Write the files of a cut into ``folder``, which will be published as ``final``; return its line.

        Args:
            cut: the lhotse cut with the fields.
            number: of the cut in its shard, from 0.
        """


@dataclass(frozen=True)
class Exported:
    """A finished export: its manifest, and how many cuts and seconds of target audio that lists."""

    manifest: Path
    num_cuts: int
    seconds: float


def export_dataset(
    dataset: str | Path, form: str, out: str | Path, *, codec: str | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Exported:  # fmt: skip
    """Write a finished dataset as files of another form; an export that was interrupted goes on.

    Args:
        dataset: the dataset directory.
        form: a name of ``sharmill.registry.EXPORTS``.
        out: a new or empty folder, or one with the same export, finished or not.
        codec: whose codes, where there are several.
        progress: called after each shard with the number of shards that are done, and of all.

    Raises:
        ConfigError: there is no such dataset, codec or form, or ``out`` holds something else.
        DamagedShard: a shard is damaged; the shards before it are done.
        FatalError: the disk is full, or the numbers of cuts do not add up.

    Example:
        >>> export_dataset("data/speech", "nemo_codes", "data/speech_codes")  # doctest: +SKIP
    """
    dataset, out = Path(dataset), Path(out).absolute()
    record = read_dataset(dataset)
    chosen = choose_codec(record, codec)
    files: Export = EXPORTS.load(form)(record, chosen)
    made_of = [field.name for field in chosen.fields[: len(record.audio_fields)]]
    shards = list(read_shards(dataset, record.num_shards))
    identity = {
        "export": form,
        "version": files.version,
        "place": str(out),
        "codec": chosen.name,
        "num_cuts": record.num_cuts,
        "content": audio_checksum(shards, (CUTS, *made_of)),
    }
    if out.resolve().is_relative_to(dataset.resolve()):
        raise ConfigError(f"{out} lies in the dataset itself: choose another place", code="bad_usage")
    _require_own(out, identity)
    make_folder(out)
    with disk_errors(out), FolderLock(out):
        # Another process may have begun an export meanwhile.
        _require_own(out, identity)
        write_atomic(out / EXPORT_FILE, msgspec.json.encode(identity) + b"\n")
        folder = out / _SHARDS_FOLDER
        make_folder(folder)
        remove_asides(out)
        remove_asides(folder)
        source = open_shard_source(dataset, files.fields, chosen.name)
        for done, shard in enumerate(shards):
            final = folder / f"{shard.index:06d}"
            if not final.is_dir():
                with closing(source.open(done, 0)) as opened:
                    _write_shard(opened, shard.count, files, final)
            progress(done + 1, len(shards))
        return _write_manifest(out / files.manifest, folder, [(shard.index, shard.count) for shard in shards])


def _require_own(out: Path, identity: dict[str, Any]) -> None:
    """Raise ConfigError unless a folder is missing, empty, or holds this export."""
    if out.exists() and not out.is_dir():
        raise ConfigError(f"{out} is a file: name a folder", code="bad_usage")
    refuse_strangers(out, [out / EXPORT_FILE, out / _SHARDS_FOLDER])
    own = (LOCK_NAME, f".{EXPORT_FILE}.")
    if not out.exists() or all(path.name.startswith(own) for path in out.iterdir()):
        return
    try:
        with open_regular(out / EXPORT_FILE, follow_links=False) as stream:
            found = msgspec.json.decode(stream.read(_MAX_IDENTITY_BYTES), type=dict[str, Any])
    except (FileNotFoundError, ValueError, *NOT_JSON):
        found = None
    if found != identity:
        what = (
            "files of something else" if found is None else "the export of another dataset, or an earlier state of it"
        )
        raise ConfigError(f"{out} has {what}: name an empty folder, or remove it", code="foreign_output")


def _write_shard(shard: ReadableShard, count: int, files: Export, final: Path) -> None:
    """Publish the folder of a shard, with the files and the lines of its cuts."""
    aside = path_aside(final)
    aside.mkdir()
    try:
        lines = []
        for number in range(count):
            # The place in an order of cuts, which an export has no use for.
            cut = shard.read(number, (0, 0, 0, 0, number))
            lines.append(msgspec.json.encode(files.write_cut(cut, number, aside, final)) + b"\n")
        (aside / _LINES_FILE).write_bytes(b"".join(lines))
        publish_directory(aside, final)
    finally:
        remove_tree(aside)


def _write_manifest(path: Path, folder: Path, counts: list[tuple[int, int]]) -> Exported:
    """Put the lines of all shards together, and check that there is one for each cut."""
    num_cuts, seconds = 0, 0.0
    with open_atomic(path) as stream:
        for index, count in counts:
            lines = read_lines(folder / f"{index:06d}" / _LINES_FILE)
            if len(lines) != count:
                raise FatalError(
                    f"{folder / f'{index:06d}'} has {len(lines)} cuts of {count}: remove this folder and run the same "
                    "command again",
                    code="accounts",
                )
            for line in lines:
                stream.write(line + b"\n")
                seconds += msgspec.json.decode(line)["duration"]
            num_cuts += count
    return Exported(path, num_cuts, seconds)
