"""Text, conversations, NeMo's manifests and lhotse's Shar as shards that our reader divides, with exact states.

NeMo reads each shard of them itself: its parser of the type is called with the files of one shard, once through and
not shuffled. Which shards are read when, and which of their examples this process has, our reader decides. Examples
of other readers are made and passed over, so more files than readers are read with less work.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import msgspec
from lhotse import CutSet
from lhotse.serialization import open_best
from nemo.collections.common.data.lhotse.cutset import get_parser_fn
from nemo.collections.common.data.lhotse.nemo_adapters import LazyNeMoTarredIterator, expand_sharded_filepaths
from omegaconf import DictConfig

import sharmill.training.nemo.tts_text  # noqa: F401  registers a type
from sharmill.errors import ConfigError
from sharmill.files.storage import checksum_bytes
from sharmill.shar.layout import CUTS
from sharmill.shar.reading.foreign import find_shards
from sharmill.shar.reading.iteration import ReadOptions, SharReader
from sharmill.shar.reading.shard import POSITION
from sharmill.shar.reading.shard_source import ShardSource
from sharmill.sources.lines import open_lines
from sharmill.training.nemo.setting_values import check_files

# The keys that name the files of each type: the first one's lines are counted.
_FILES = {
    "txt": ("paths",),
    "txt_jsonl": ("paths",),
    "nemo_sft_jsonl": ("paths",),
    "tts_text": ("manifest_filepath",),
    "txt_pair": ("source_paths", "target_paths"),
    "multimodal_conversation": ("manifest_filepath", "tarred_audio_filepaths"),
    "share_gpt": ("manifest_filepath", "tarred_audio_filepaths"),
    "nemo": ("manifest_filepath", "tarred_audio_filepaths"),
    "nemo_tarred": ("manifest_filepath", "tarred_audio_filepaths"),
}


def open_examples(entry: Mapping[str, Any], **order: Any) -> SharReader:
    """Return the reader of the examples of an entry of ``input_cfg``; its type is in ``of_type``.

    Args:
        entry: its options, with those that NeMo hands down.
        order: ``shuffle``, ``seed``, ``rank``, ``world_size`` and ``infinite`` of ``open_shar``.

    Raises:
        ConfigError: a file is not there, or there are not as many of one kind as of the other.
    """
    return SharReader(_ExampleSource(entry), ReadOptions(**order))


class _ExampleSource(ShardSource):
    """The files of an entry, as shards."""

    sequential = True

    def __init__(self, entry: Mapping[str, Any]) -> None:
        self._kind = entry["of_type"]
        self._entry = {**entry, "type": self._kind, "force_finite": True, "shuffle": False}
        self._parse = get_parser_fn(self._kind)
        self._counts: dict[int, int] = {}
        self._tarred: LazyNeMoTarredIterator | None = None
        tarred = entry.get("tarred_audio_filepaths") is not None
        if self._kind in ("nemo", "nemo_tarred") and tarred and not entry.get("metadata_only", False):
            check_files(self._kind, entry)
            # One manifest may be that of several tars, of which NeMo knows which line belongs to which.
            try:
                self._tarred = self._parse(DictConfig(self._entry | {"shard_seed": 0}))[0].data
            except AssertionError as error:  # names of files, and how they belong together
                raise ConfigError(f"input_cfg: type {self._kind}: {error}", code="bad_config_value") from error
            self._shards: list[dict[str, Any]] = [{"shard": shard} for shard in self._tarred.shard_ids]
        elif self._kind == "lhotse_shar":
            self._shards = [{"shar_path": files} for files in _shar_files(entry["shar_path"])]
        else:
            self._shards = entry_files(self._kind, entry)

    @property
    def num_shards(self) -> int:
        return len(self._shards)

    @property
    def identity(self) -> dict[str, Any]:
        """The type, and the names and sizes of its files."""
        if self._tarred is not None:
            names = [*self._tarred.paths, *self._tarred.tar_paths]
        else:
            names = [name for shard in self._shards for name in _names_in(shard)]
        files = [(Path(name).name, Path(name).stat().st_size if Path(name).exists() else None) for name in names]
        return {"type": self._kind, "files": checksum_bytes(msgspec.json.encode(files))}

    def count(self, shard: int) -> int:
        """Return the lines of a shard: no more examples than these come of it, and perhaps fewer."""
        if shard not in self._counts:
            files = self._shards[shard]
            if self._tarred is None:
                self._counts[shard] = count_lines(next(_names_in(files)))
            elif len(self._tarred.paths) > 1:
                self._counts[shard] = count_lines(self._tarred.paths[shard])
            else:
                self._counts[shard] = len(self._tarred.shard_id_to_manifest[files["shard"]])
        return self._counts[shard]

    def open(self, shard: int, epoch: int) -> _ExampleShard:
        files = self._shards[shard]
        if self._tarred is not None:
            one = copy.copy(self._tarred)
            one.shard_id_to_manifest = {files["shard"]: self._tarred.shard_id_to_manifest[files["shard"]]}
            if len(one.paths) > 1:
                one.paths = [one.paths[shard]]
            return _ExampleShard(iter(one))
        # What NeMo draws for an example, such as a question for a pair, follows from epoch and shard.
        examples: CutSet = self._parse(DictConfig(self._entry | files | {"shard_seed": epoch * 65537 + shard}))[0]
        return _ExampleShard(iter(examples))


class _ExampleShard:
    """The examples of one shard, in its order."""

    def __init__(self, examples: Iterator[Any]) -> None:
        self._examples = examples
        self._next = 0

    def read(self, number: int, position: tuple[int, ...]) -> Any:
        """Return an example, or None where NeMo leaves out as many of the shard's lines."""
        for example in self._examples:
            self._next += 1
            if self._next > number:
                setattr(example, POSITION, position)
                return example
        return None

    def close(self) -> None:
        """Let go of the files, which NeMo closes with its iterator."""
        self._examples = iter(())


def count_lines(path: str) -> int:
    """Count the lines of a file, which may be compressed or remote."""
    with open_listed(path) as stream:
        return sum(1 for _ in stream)


def open_listed(path: str) -> IO[bytes]:
    """Open a file of lines, which may be compressed; an address is fetched, as NeMo does, but no command is run.

    Raises:
        ConfigError: it is a pipe, is not there, or is not a regular file.
    """
    if path.startswith("pipe:"):
        raise ConfigError(
            f"{path!r} is a command, which is not run to look at its lines: name a file", code="bad_config_value"
        )
    if "://" in path:
        return open_best(path, "rb")  # type: ignore[no-any-return]
    return open_lines(Path(path))


def entry_files(kind: str, entry: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the options of each shard: one file for each key."""
    columns = {key: expand_sharded_filepaths(entry[key]) for key in _FILES[kind] if entry.get(key) is not None}
    lengths = {key: len(names) for key, names in columns.items()}
    if len(set(lengths.values())) > 1:
        raise ConfigError(
            f"input_cfg: type {kind} has {' and '.join(f'{n} files as {key}' for key, n in lengths.items())}: there "
            "must be as many of each",
            code="bad_config_value",
        )
    check_files(kind, entry)
    return [dict(zip(columns, names, strict=True)) for names in zip(*columns.values(), strict=True)]


def _shar_files(path: str | Mapping[str, Any]) -> list[dict[str, list[str]]]:
    """Return the files of each shard by field, the cuts first."""
    if isinstance(path, str):
        shards = [
            {field.rpartition("/")[2]: [str(file)] for field, file in shard.files.items()}
            for shard in find_shards(Path(path))
        ]
    else:
        columns = {field: expand_sharded_filepaths(files) for field, files in path.items()}
        if CUTS not in columns or len({len(files) for files in columns.values()}) > 1:
            raise ConfigError(
                "input_cfg: shar_path has the files of each field, as many of each and cuts among them",
                code="bad_config_value",
            )
        rows = zip(*columns.values(), strict=True)
        shards = [{field: [name] for field, name in zip(columns, row, strict=True)} for row in rows]
    return [{CUTS: shard.pop(CUTS), **shard} for shard in shards]


def _names_in(files: Any) -> Iterator[str]:
    if isinstance(files, str):
        yield files
    elif isinstance(files, Mapping):
        for one in files.values():
            yield from _names_in(one)
    elif isinstance(files, list):
        for one in files:
            yield from _names_in(one)
