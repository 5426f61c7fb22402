"""Examples of NeMo's data types, divided among ranks and workers as shards of sharmill's reader.

NeMo reads each shard: its parser for the type is called with the files of one shard, for one pass without shuffling.
sharmill's reader chooses the order of the shards and this process's share of the examples. The examples of other
readers are parsed and skipped, so reading is more efficient if there are more files than readers.
"""

import copy
import math
import os
import re
import tarfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from operator import itemgetter
from pathlib import Path
from typing import IO, Any, Final, Literal

import msgspec
import numpy as np
import torch.distributed as dist
from lhotse import AudioSource, CutSet, Recording
from lhotse.lazy import LazyJsonlIterator
from lhotse.serialization import open_best
from nemo.collections.common.data.lhotse.cutset import get_parser_fn
from nemo.collections.common.data.lhotse.nemo_adapters import (
    LazyNeMoIterator,
    LazyNeMoTarredIterator,
    expand_sharded_filepaths,
)
from nemo.collections.common.data.lhotse.text_adapters import NeMoMultimodalConversationShareGPTJsonlAdapter
from nemo.utils.data_utils import is_datastore_cache_shared
from omegaconf import DictConfig

from sharmill.errors import ConfigError, FatalError, refuse
from sharmill.files.checksums import checksum_bytes
from sharmill.files.clients import FETCHES_AT_ONCE
from sharmill.prefetch import prefetch
from sharmill.shar.fields import CUTS, POSITION
from sharmill.shar.reading.epoch_reader import ReadOptions
from sharmill.shar.reading.iteration import SharReader
from sharmill.shar.reading.shard_source import ShardSource
from sharmill.shar.rebuild import find_shards
from sharmill.sources.files import open_lines
from sharmill.training.nemo.entries import TYPES, texts_in
from sharmill.training.nemo.stores import copied, is_stored, refuse_command, version_of

# Matches the names of numbered tars that are not called audio_N.tar; NeMo would not find the number in such names.
_TAR_NAME: Final = re.compile(r"(?<![^/])(?!audio[^/]*_\d)[^/]*?(\d+)\.tar$")
# Matches NeMo's names for segments of a file in a tar.
_SEGMENT: Final = re.compile(r"^(.+)-sub\d+(\.\w+)?$")
# Copying a large dataset takes hours, but torch's default timeouts are minutes.
_COPY_TIMEOUT: Final = timedelta(days=7)
# Keys of entries whose files must exist.
_FILES: Final = (
    "manifest_filepath", "tarred_audio_filepaths", "cuts_path", "paths", "source_paths", "target_paths",
    "questions_path",
)  # fmt: skip


def open_examples(entry: Mapping[str, Any], **order: Any) -> SharReader:
    """Return a reader of the examples of an entry of ``input_cfg``.

    Args:
        entry: options of the entry, including inherited ones; ``of_type`` is its type.
        order: ``shuffle``, ``seed``, ``rank``, ``world_size`` and ``infinite`` of ``open_shar``.

    Raises:
        ConfigError: a file is missing, or the numbers of files differ between keys.
    """
    return SharReader(_ExampleSource(entry), ReadOptions(**order))


def copy_audio(entries: Sequence[Mapping[str, Any]]) -> None:
    """Copy the untarred audio of manifests from object stores into the cache before any rank reads it.

    As NeMo documents, rank 0 copies into a shared cache (``NEMO_DATA_STORE_CACHE_SHARED``, 1 by default), or local rank
    0 of each node copies into a cache per node. The other ranks wait. If torch.distributed is not initialized, each
    rank copies the files that are missing.

    Args:
        entries: entries that read data, from ``prepare_settings``.

    Raises:
        ConfigError, FatalError: a rank failed to copy; raised on all ranks.
    """
    untarred = [
        {**entry, "metadata_only": True}
        for entry in entries
        if entry.get("of_type") == "nemo" and not entry.get("tarred_audio_filepaths") and not entry.get("metadata_only")
        if any(map(is_stored, texts_in(entry["manifest_filepath"])))
    ]
    if not untarred:
        return
    together = dist.is_available() and dist.is_initialized()
    problems: list[Exception | None] = [None]
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if not together or (dist.get_rank() if is_datastore_cache_shared() else local_rank) == 0:
        try:
            # In metadata-only mode, NeMo uses the names of the files as ids of the cuts.
            list(_fetch_ahead(copied, (cut.id for entry in untarred for cut in open_examples(entry))))
        except (ConfigError, FatalError) as error:
            problems = [error]
    if together:
        group = dist.new_group(timeout=_COPY_TIMEOUT, backend="gloo")
        own, problems = problems[0], problems * dist.get_world_size()
        dist.all_gather_object(problems, own, group)
        dist.destroy_process_group(group)
    for problem in filter(None, problems):
        raise problem


def _fetch_ahead(ask: Callable[[str], Any], names: Iterable[str]) -> Iterator[Any]:
    """Yield ``ask(name)`` for each file name, in order, while several more requests are already running."""
    return prefetch(ask, names, threads=FETCHES_AT_ONCE, ahead=2 * FETCHES_AT_ONCE)


class _ExampleSource(ShardSource):
    """The files of an entry as shards."""

    sequential = True

    def __init__(self, entry: Mapping[str, Any]) -> None:
        self._kind = entry["of_type"]
        self._entry = {**entry, "type": self._kind, "force_finite": True, "shuffle": False}
        self._parse = get_parser_fn(self._kind)
        self._counts: dict[int, int] = {}
        self._expected: dict[int, np.ndarray] = {}
        self._tarred: LazyNeMoTarredIterator | None = None
        named = [text for key in TYPES[self._kind].files for text in texts_in(entry.get(key))]
        stored = [name for text in named for name in expand_sharded_filepaths(text) if is_stored(name)]
        tarred = entry.get("tarred_audio_filepaths") is not None
        _check_stored(self._kind, entry, stored, tarred=tarred)
        self._versions = dict(zip(stored, _fetch_ahead(version_of, stored), strict=True))
        if self._kind in ("nemo", "nemo_tarred") and tarred and not entry.get("metadata_only", False):
            check_files(self._kind, entry)
            self._tarred = self._open_tarred()
            self._shards: list[dict[str, Any]] = [{"shard": shard} for shard in self._tarred.shard_ids]
        elif self._kind == "lhotse_shar":
            self._shards = [{"shar_path": files} for files in _shar_files(entry["shar_path"])]
        else:
            self._shards = entry_files(self._kind, entry)
        self.num_shards = len(self._shards)

    def _open_tarred(self) -> LazyNeMoTarredIterator:
        """Return NeMo's reader of tars, which also assigns the lines of a shared manifest to their tars."""
        manifests, tars = (expand_sharded_filepaths(self._entry[key]) for key in TYPES["nemo_tarred"].files)
        named = {_TAR_NAME.sub(r"audio_\1.tar", tar): tar for tar in tars}
        manifest = copied(manifests[0]) if len(manifests) == 1 else self._entry["manifest_filepath"]
        files = {"manifest_filepath": manifest, "tarred_audio_filepaths": list(named)}
        try:
            tarred: LazyNeMoTarredIterator = self._parse(DictConfig(self._entry | files | {"shard_seed": 0}))[0].data
        except AssertionError as error:  # NeMo checks the names of manifests and tars with assertions
            raise ConfigError(f"input_cfg: type {self._kind}: {error}", code="bad_config_value") from error
        tarred.paths, tarred.tar_paths = manifests, list(tars)
        tarred.shard_id_to_tar_path = {number: named[tar] for number, tar in tarred.shard_id_to_tar_path.items()}
        return tarred

    @property
    def identity(self) -> dict[str, Any]:
        """The type, and a checksum of the names and sizes of its files (in object stores, of names and versions)."""
        if self._tarred is not None:
            names = [*self._tarred.paths, *self._tarred.tar_paths]
        else:
            names = [name for shard in self._shards for name in texts_in(shard)]
        files = [
            (Path(name).name, *self._versions.get(name, [Path(name).stat().st_size if Path(name).exists() else None]))
            for name in names
        ]
        return {"type": self._kind, "files": checksum_bytes(msgspec.json.encode(files))}

    def count(self, shard: int) -> int:
        """Return the number of lines of a shard, an upper bound on the number of its examples."""
        if shard not in self._counts:
            files = self._shards[shard]
            if self._tarred is None:
                self._counts[shard] = count_lines(next(texts_in(files)))
            else:
                lines = self._tarred.shard_id_to_manifest[files["shard"]]
                self._counts[shard] = len(lines) if isinstance(lines, list) else count_lines(lines.path)
        return self._counts[shard]

    def expected(self, shard: int) -> np.ndarray | Literal[True]:
        shortest, longest = self._entry.get("limits", (None, None))
        if shortest is None and longest is None:
            return True
        if shard not in self._expected:
            # NeMo uses the whole file in the tar if the file's line has no duration.
            known = (line.get("duration") for line in self._lines(shard) if not line.get("_skipme"))
            found = [one is None or (shortest or 0) <= one <= (longest or math.inf) for one in known]
            count = self.count(shard)
            self._expected[shard] = np.array((found + [False] * count)[:count])
        return self._expected[shard]

    def _lines(self, shard: int) -> Iterable[dict[str, Any]]:
        """Return the lines of a shard's manifest, in the order of NeMo's examples.

        The order of the files in a local tar is read from the tar's headers. A tar in an object store would have to be
        copied for this, so its files are assumed to be in the order of the manifest.
        """
        files, tarred = self._shards[shard], self._tarred
        if tarred is None:
            return LazyJsonlIterator(copied(next(texts_in(files))))
        lines, tar = tarred.shard_id_to_manifest[files["shard"]], tarred.shard_id_to_tar_path[files["shard"]]
        segments: dict[str, list[dict[str, Any]]] = {}
        for line in lines if isinstance(lines, list) else LazyJsonlIterator(copied(lines.path)):
            segments.setdefault(_SEGMENT.sub(r"\1\2", line["audio_filepath"]), []).append(line)
        if tarred.use_ais_get_batch:
            return [line for own in segments.values() for line in own]
        names = list(segments) if is_stored(tar) else _member_names(tar)
        return [line for name in names for line in sorted(segments.get(name, ()), key=itemgetter("audio_filepath"))]

    def open(self, shard: int, epoch: int) -> "_ExampleShard":
        files = self._shards[shard]
        if self._tarred is not None:
            one, number = copy.copy(self._tarred), files["shard"]
            lines, tar = one.shard_id_to_manifest[number], one.shard_id_to_tar_path[number]
            if len(one.paths) > 1:
                one.paths, lines = [lines.path], LazyJsonlIterator(copied(lines.path))
            one.shard_id_to_manifest = {number: lines}
            one.shard_id_to_tar_path = {number: tar if one.use_ais_get_batch else copied(tar)}
            return _ExampleShard(iter(one))
        if self._kind not in ("nemo", "nemo_tarred"):
            files = _local(files)
        # NeMo's random choices, such as a question for a pair, depend only on the epoch and the shard.
        examples: CutSet = self._parse(DictConfig(self._entry | files | {"shard_seed": epoch * 65537 + shard}))[0]
        if isinstance(lines := examples.data, LazyNeMoIterator):
            lines.__class__, lines.source = _StoredManifest, LazyJsonlIterator(copied(lines.path))
        elif isinstance(lines, NeMoMultimodalConversationShareGPTJsonlAdapter):
            lines.__class__ = _ShareGpt
        return _ExampleShard(iter(examples))


def _member_names(tar: str) -> list[str]:
    """Return the names in a tar up to the first damaged place, at which NeMo also stops."""
    names: list[str] = []
    with suppress(tarfile.ReadError), tarfile.open(tar) as members:
        names.extend(member.name for member in members)
    return names


def _check_stored(kind: str, entry: Mapping[str, Any], stored: Sequence[str], *, tarred: bool) -> None:
    """Raise ConfigError if files of an entry are in an object store and could not be found there."""
    refuse(
        (stored and kind == "lhotse_shar" and isinstance(entry["shar_path"], str),
         f"shar_path {entry.get('shar_path')} is a folder in an object store, which cannot be listed: give the files "
         "of each field"),
        (stored and TYPES[kind].holds == "conversations" and not tarred and not entry.get("audio_root"),
         f"type {kind} with a manifest in an object store needs its audio in tars: set tarred_audio_filepaths"),
        code="missing_input",
    )  # fmt: skip


def _local(names: Any) -> Any:
    """Replace names of files in object stores with names of local copies, in nested lists and mappings."""
    if isinstance(names, dict):
        return {key: _local(value) for key, value in names.items()}
    return [_local(name) for name in names] if isinstance(names, list) else copied(names)


class _StoredManifest(LazyNeMoIterator):
    """Cuts of a manifest whose audio is copied from an object store when it is loaded.

    NeMo builds the URLs of the audio.
    """

    def _create_recording(self, audio_path: str, duration: float, sampling_rate: int | None = None) -> Recording:
        if sampling_rate is None and is_stored(audio_path):
            recording = Recording.from_file(copied(audio_path), recording_id=Path(audio_path).stem)
        else:
            recording = super()._create_recording(audio_path, duration, sampling_rate)
        if is_stored(audio_path):
            recording.sources = [_StoredAudio("url", source.channels, audio_path) for source in recording.sources]
        return recording


class _ShareGpt(NeMoMultimodalConversationShareGPTJsonlAdapter):
    """Conversations read from a file; their audio may be at URLs, but commands are refused."""

    def _resolve_cut_from_path(self, turn: dict[str, Any], manifest_path: str) -> Any:
        refuse_command(turn["value"])
        return super()._resolve_cut_from_path(turn, manifest_path)


class _StoredAudio(AudioSource):
    """Audio in an object store, copied when it is loaded."""

    def load_audio(self, *args: Any, **options: Any) -> Any:
        return AudioSource("file", self.channels, copied(self.source)).load_audio(*args, **options)


class _ExampleShard:
    """The examples of one shard, in order."""

    def __init__(self, examples: Iterator[Any]) -> None:
        self._examples = examples
        self._next = 0

    def read(self, number: int, position: tuple[int, ...]) -> Any:
        """Return example ``number`` of the shard, or None if NeMo skipped lines and has fewer examples."""
        for example in self._examples:
            self._next += 1
            if self._next > number:
                setattr(example, POSITION, position)
                return example
        return None


def count_lines(path: str) -> int:
    """Count the lines of a file, which may be compressed or remote."""
    with open_listed(path) as stream:
        return sum(1 for _ in stream)


def open_listed(path: str) -> IO[bytes]:
    """Open a file of lines, which may be compressed or at a URL; commands are not run.

    Raises:
        ConfigError: the path is a pipe, does not exist, or is not a regular file.
    """
    refuse((path.startswith("pipe:"), f"{path!r} is a command, which is not run to read its lines: name a file"))
    if "://" in path and not is_stored(path):
        return open_best(path, "rb")
    return open_lines(Path(copied(path)))


def check_files(kind: str, entry: Mapping[str, Any]) -> None:
    """Raise ConfigError if a file of an entry does not exist.

    Only the first and the last file are checked if they are tars or are in an object store. Pipes and other URLs are
    not checked.
    """
    for key in _FILES:
        if entry.get(key) is None:
            continue
        names = [name for name in expand_sharded_filepaths(entry[key]) if isinstance(name, str)]
        few = key == "tarred_audio_filepaths" or any(map(is_stored, names))
        for name in (names[0], names[-1]) if few and names else names:
            if is_stored(name):
                version_of(name)
            elif "://" not in name and not name.startswith("pipe:") and not Path(name).exists():
                raise ConfigError(f"input_cfg: type {kind}: the file {name} does not exist", code="missing_input")


def entry_files(kind: str, entry: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the options of each shard, which name one file per key."""
    columns = {key: expand_sharded_filepaths(entry[key]) for key in TYPES[kind].files if entry.get(key) is not None}
    lengths = {key: len(names) for key, names in columns.items()}
    counts = " and ".join(f"{count} files as {key}" for key, count in lengths.items())
    refuse((len(set(lengths.values())) > 1, f"input_cfg: type {kind} has {counts}: the numbers must be equal"))
    check_files(kind, entry)
    return [dict(zip(columns, names, strict=True)) for names in zip(*columns.values(), strict=True)]


def _shar_files(path: str | Mapping[str, Any]) -> list[dict[str, list[str]]]:
    """Return the files of each shard, keyed by field; the cuts come first."""
    if isinstance(path, str):
        shards = [
            {field.rpartition("/")[2]: [str(Path(path, file))] for field, file in shard.files.items()}
            for shard in find_shards(Path(path))
        ]
    else:
        columns = {field: expand_sharded_filepaths(files) for field, files in path.items()}
        if CUTS not in columns or len({len(files) for files in columns.values()}) > 1:
            raise ConfigError(
                "input_cfg: shar_path must list the same number of files for each field, including cuts",
                code="bad_config_value",
            )
        shards = [
            {field: [name] for field, name in zip(columns, row, strict=True)}
            for row in zip(*columns.values(), strict=True)
        ]
    return [{CUTS: shard.pop(CUTS), **shard} for shard in shards]
