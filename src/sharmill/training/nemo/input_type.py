"""The types that sharmill adds to NeMo's ``input_cfg``; importing this module registers them.

``type: sharmill`` reads our datasets. Scripts that call NeMo's loader themselves need nothing but the import.
``type: tts_text`` is text for hybrid ASR-TTS. Text, conversations, NeMo's manifests and lhotse's Shar are divided among
ranks and workers, with exact states, as shards of our reader. NeMo reads each of these shards itself: its parser of the
type is called with the files of one shard, once through and not shuffled. Which shards are read when, and which of
their examples this process has, our reader decides. Examples of other readers are made and passed over, so more files
than readers are read with less work.
"""

import copy
import logging
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import IO, Annotated, Any, Final

import msgspec
import torch.distributed as dist
from lhotse import AudioSource, CutSet, Recording
from lhotse.lazy import LazyJsonlIterator
from lhotse.serialization import open_best
from nemo.collections.common.data.lhotse.cutset import data_type_parser, get_parser_fn
from nemo.collections.common.data.lhotse.nemo_adapters import (
    LazyNeMoIterator,
    LazyNeMoTarredIterator,
    expand_sharded_filepaths,
)
from nemo.collections.common.data.lhotse.text_adapters import (
    NeMoMultimodalConversationShareGPTJsonlAdapter,
    TextExample,
)
from nemo.utils.data_utils import is_datastore_cache_shared
from omegaconf import DictConfig, OmegaConf

from sharmill.errors import ConfigError, FatalError, refuse
from sharmill.files.checksums import checksum_bytes
from sharmill.files.clients import FETCHES_AT_ONCE
from sharmill.files.location import Location
from sharmill.manifest import nemo_language
from sharmill.prefetch import prefetch
from sharmill.shar import open_shar
from sharmill.shar.fields import CUTS
from sharmill.shar.reading.cuts import POSITION
from sharmill.shar.reading.epoch_reader import ReadOptions
from sharmill.shar.reading.iteration import SharReader
from sharmill.shar.reading.shard_source import ShardSource
from sharmill.shar.rebuild import find_shards
from sharmill.sources.files import iterate_lines, open_lines
from sharmill.training.nemo.classic import DIVIDED, TYPES, check_entry, entry_directory
from sharmill.training.nemo.loader import PartitionedCuts
from sharmill.training.nemo.settings import check_files, texts_in
from sharmill.training.nemo.stores import copied, is_stored, refuse_command, version_of

log = logging.getLogger(__name__)

_Text = Annotated[str, msgspec.Meta(pattern=r"\S")]
# A tar whose name NeMo finds no number in, since it is not audio_N.tar.
_NAME_OF_TAR: Final = re.compile(r"(?<![^/])(?!audio[^/]*_\d)[^/]*?(\d+)\.tar$")
# A large set takes hours to copy, and torch's own time-outs are minutes.
_LONGEST_COPY: Final = timedelta(days=7)
_SPOKEN: Final = ("tts_text_normalized", "tts_text")


@data_type_parser("tts_text")
def read_tts_text(entry: DictConfig) -> tuple[CutSet, bool]:
    """Return a TextExample of each line, with ``tts_text`` and ``tts_text_normalized`` as attributes where it has them.

    Raises:
        ConfigError: while iterating: a line is no such record; the message names it.
    """
    examples = CutSet(_TtsTexts(expand_sharded_filepaths(entry.manifest_filepath), entry.get("language")))
    return (examples if entry.get("force_finite", False) else examples.repeat(preserve_id=True)), True


class _TtsTexts:
    """The examples of manifests, once through."""

    def __init__(self, paths: list[str], language: str | None) -> None:
        self._paths, self._language = paths, language

    def __iter__(self) -> Iterator[TextExample]:
        for path in self._paths:
            for number, (_, line) in enumerate(iterate_lines(Path(path), "manifest_filepath"), 1):
                try:
                    record = msgspec.json.decode(line, type=_TtsRecord)
                except (ValueError, RecursionError) as error:
                    raise ConfigError(f"{path}, record {number}: {error}", code="bad_manifest") from error
                spoken = {key: getattr(record, key) for key in _SPOKEN if getattr(record, key) is not None}
                yield TextExample(record.text, language=record.lang or self._language, custom=spoken)


class _TtsRecord(msgspec.Struct):
    """A line: ``text`` is to be recognised, one of the others to be spoken."""

    text: _Text
    lang: _Text | None = None
    tts_text_normalized: _Text | None = None
    tts_text: _Text | None = None
    audio_filepath: Any = None

    def __post_init__(self) -> None:
        if self.audio_filepath is not None:
            raise ValueError("it has audio_filepath, and text alone is spoken by a TTS model: use type nemo")
        if self.tts_text_normalized is None and self.tts_text is None:
            raise ValueError("it has neither tts_text_normalized nor tts_text, which the TTS model is to speak")


def open_examples(entry: Mapping[str, Any], **order: Any) -> SharReader:
    """Return the reader of the examples of an entry of ``input_cfg``; its type is in ``of_type``.

    Args:
        entry: its options, with those that NeMo hands down.
        order: ``shuffle``, ``seed``, ``rank``, ``world_size`` and ``infinite`` of ``open_shar``.

    Raises:
        ConfigError: a file is not there, or there are not as many of one kind as of the other.
    """
    return SharReader(_ExampleSource(entry), ReadOptions(**order))


def copy_audio(entries: Sequence[Mapping[str, Any]]) -> None:
    """Copy the audio that manifests in stores name outside of tars, before any rank reads it.

    As NeMo's page has it, rank 0 copies into a cache that is shared (``NEMO_DATA_STORE_CACHE_SHARED``, 1 by default),
    and local rank 0 of each node into one that is not; the others wait. Where torch.distributed is not initialized,
    each rank copies what is not there yet.

    Args:
        entries: that read data, as ``prepare_settings`` leaves them.

    Raises:
        ConfigError, FatalError: a rank could not copy; raised on all of them.
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
    problem: Exception | None = None
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if not together or (dist.get_rank() if is_datastore_cache_shared() else local_rank) == 0:
        try:
            for entry in untarred:
                names = (cut.id for cut in open_examples(entry))  # NeMo's without audio have its name
                for _ in prefetch(copied, names, threads=FETCHES_AT_ONCE, ahead=2 * FETCHES_AT_ONCE):
                    pass
        except (ConfigError, FatalError) as error:
            problem = error
    problems = [problem]
    if together:
        group = dist.new_group(timeout=_LONGEST_COPY, backend="gloo")
        problems *= dist.get_world_size()
        dist.all_gather_object(problems, problem, group)
        dist.destroy_process_group(group)
    for told in filter(None, problems):
        raise told


class _ExampleSource(ShardSource):
    """The files of an entry, as shards."""

    sequential = True

    def __init__(self, entry: Mapping[str, Any]) -> None:
        self._kind = entry["of_type"]
        self._entry = {**entry, "type": self._kind, "force_finite": True, "shuffle": False}
        self._parse = get_parser_fn(self._kind)
        self._counts: dict[int, int] = {}
        self._tarred: LazyNeMoTarredIterator | None = None
        named = [text for key in TYPES[self._kind].files for text in texts_in(entry.get(key))]
        stored = [name for text in named for name in expand_sharded_filepaths(text) if is_stored(name)]
        tarred = entry.get("tarred_audio_filepaths") is not None
        _check_stored(self._kind, entry, stored, tarred=tarred)
        versions = prefetch(version_of, stored, threads=FETCHES_AT_ONCE, ahead=2 * FETCHES_AT_ONCE)
        self._versions = dict(zip(stored, versions, strict=True))
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
        """Return NeMo's reader of tars; of one manifest of several, it knows which lines belong to which."""
        manifests, tars = (expand_sharded_filepaths(self._entry[key]) for key in TYPES["nemo_tarred"].files)
        named = {_NAME_OF_TAR.sub(r"audio_\1.tar", tar): tar for tar in tars}
        manifest = copied(manifests[0]) if len(manifests) == 1 else self._entry["manifest_filepath"]
        files = {"manifest_filepath": manifest, "tarred_audio_filepaths": list(named)}
        try:
            tarred: LazyNeMoTarredIterator = self._parse(DictConfig(self._entry | files | {"shard_seed": 0}))[0].data
        except AssertionError as error:  # names of files, and how they belong together
            raise ConfigError(f"input_cfg: type {self._kind}: {error}", code="bad_config_value") from error
        tarred.paths, tarred.tar_paths = manifests, list(tars)
        tarred.shard_id_to_tar_path = {number: named[tar] for number, tar in tarred.shard_id_to_tar_path.items()}
        return tarred

    @property
    def identity(self) -> dict[str, Any]:
        """The type, and the names and sizes of its files; of those in stores the versions."""
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
        """Return the lines of a shard: no more examples than these come of it, and perhaps fewer."""
        if shard not in self._counts:
            files = self._shards[shard]
            if self._tarred is None:
                self._counts[shard] = count_lines(next(texts_in(files)))
            elif len(self._tarred.paths) > 1:
                self._counts[shard] = count_lines(self._tarred.paths[shard])
            else:
                self._counts[shard] = len(self._tarred.shard_id_to_manifest[files["shard"]])
        return self._counts[shard]

    def open(self, shard: int, epoch: int) -> "_ExampleShard":
        files = self._shards[shard]
        if self._tarred is not None:
            one, number = copy.copy(self._tarred), files["shard"]
            lines, tar = one.shard_id_to_manifest[number], one.shard_id_to_tar_path[number]
            if len(one.paths) > 1:
                one.paths, lines = [one.paths[shard]], LazyJsonlIterator(copied(lines.path))
            one.shard_id_to_manifest = {number: lines}
            one.shard_id_to_tar_path = {number: tar if one.use_ais_get_batch else copied(tar)}
            return _ExampleShard(iter(one))
        if self._kind not in ("nemo", "nemo_tarred"):
            files = _local(files)
        # NeMo's draws for an example, such as a question for a pair, follow from epoch and shard.
        examples: CutSet = self._parse(DictConfig(self._entry | files | {"shard_seed": epoch * 65537 + shard}))[0]
        if isinstance(lines := examples.data, LazyNeMoIterator):
            lines.__class__, lines.source = _StoredManifest, LazyJsonlIterator(copied(lines.path))
        elif isinstance(lines, NeMoMultimodalConversationShareGPTJsonlAdapter):
            lines.__class__ = _ShareGpt
        return _ExampleShard(iter(examples))


def _check_stored(kind: str, entry: Mapping[str, Any], stored: Sequence[str], *, tarred: bool) -> None:
    """Raise ConfigError for files in a store that could not be found there."""
    refuse(
        (stored and kind == "lhotse_shar" and isinstance(entry["shar_path"], str),
         f"shar_path {entry.get('shar_path')} is a folder in a store, which is not listed: name the files by field"),
        (stored and TYPES[kind].holds == "conversations" and not tarred and not entry.get("audio_root"),
         f"type {kind} with a manifest in a store needs its audio in tars: set tarred_audio_filepaths"),
        code="missing_input",
    )  # fmt: skip


def _local(names: Any) -> Any:
    """Return names of files, in nested lists and mappings, with those of copies in place of those in stores."""
    if isinstance(names, dict):
        return {key: _local(value) for key, value in names.items()}
    return [_local(name) for name in names] if isinstance(names, list) else copied(names)


class _StoredManifest(LazyNeMoIterator):
    """The cuts of a manifest, of which audio in a store is copied where it is loaded; NeMo joins the URLs."""

    def _create_recording(self, audio_path: str, duration: float, sampling_rate: int | None = None) -> Recording:
        if sampling_rate is None and is_stored(audio_path):
            recording = Recording.from_file(copied(audio_path), recording_id=Path(audio_path).stem)
        else:
            recording = super()._create_recording(audio_path, duration, sampling_rate)
        if is_stored(audio_path):
            recording.sources = [_StoredAudio("url", source.channels, audio_path) for source in recording.sources]
        return recording


class _ShareGpt(NeMoMultimodalConversationShareGPTJsonlAdapter):
    """The conversations of a file, in which sounds may have URLs."""

    def _resolve_cut_from_path(self, turn: dict[str, Any], manifest_path: str) -> Any:
        refuse_command(turn["value"])
        return super()._resolve_cut_from_path(turn, manifest_path)


class _StoredAudio(AudioSource):
    """Audio in a store."""

    def load_audio(self, *args: Any, **options: Any) -> Any:
        return AudioSource("file", self.channels, copied(self.source)).load_audio(*args, **options)


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


def count_lines(path: str) -> int:
    """Count the lines of a file, which may be compressed or remote."""
    with open_listed(path) as stream:
        return sum(1 for _ in stream)


def open_listed(path: str) -> IO[bytes]:
    """Open a file of lines, which may be compressed; an address is fetched, as NeMo does, but no command is run.

    Raises:
        ConfigError: it is a pipe, is not there, or is not a regular file.
    """
    refuse((path.startswith("pipe:"), f"{path!r} is a command, which is not run to look at its lines: name a file"))
    if "://" in path and not is_stored(path):
        return open_best(path, "rb")  # type: ignore[no-any-return]
    return open_lines(Path(copied(path)))


def entry_files(kind: str, entry: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the options of each shard: one file for each key."""
    columns = {key: expand_sharded_filepaths(entry[key]) for key in TYPES[kind].files if entry.get(key) is not None}
    lengths = {key: len(names) for key, names in columns.items()}
    told = " and ".join(f"{count} files as {key}" for key, count in lengths.items())
    refuse((len(set(lengths.values())) > 1, f"input_cfg: type {kind} has {told}: there must be as many of each"))
    check_files(kind, entry)
    return [dict(zip(columns, names, strict=True)) for names in zip(*columns.values(), strict=True)]


def _shar_files(path: str | Mapping[str, Any]) -> list[dict[str, list[str]]]:
    """Return the files of each shard by field, the cuts first."""
    if isinstance(path, str):
        shards = [
            {field.rpartition("/")[2]: [str(Path(path, file))] for field, file in shard.files.items()}
            for shard in find_shards(Path(path))
        ]
    else:
        columns = {field: expand_sharded_filepaths(files) for field, files in path.items()}
        if CUTS not in columns or len({len(files) for files in columns.values()}) > 1:
            raise ConfigError(
                "input_cfg: shar_path has the files of each field, as many of each and cuts among them",
                code="bad_config_value",
            )
        shards = [
            {field: [name] for field, name in zip(columns, row, strict=True)}
            for row in zip(*columns.values(), strict=True)
        ]
    return [{CUTS: shard.pop(CUTS), **shard} for shard in shards]


@data_type_parser("sharmill")
def read_sharmill(entry: DictConfig) -> tuple[CutSet, bool]:
    """Return the cuts of one entry, without end unless ``force_finite`` or ``metadata_only`` is set.

    Returns:
        The CutSet, and True: like tarred data and text it is read where the batches are made.

    Raises:
        ConfigError: an unknown option, or no such dataset, field or codec.
    """
    options: dict[str, Any] = OmegaConf.to_container(entry, resolve=True)  # type: ignore[assignment]
    check_entry(options, {})
    for key, default in {"text_field": "text", "lang_field": "lang"}.items():
        if (field := options.get(key, default)) != default:
            log.warning("%s: %s is not for type sharmill, whose cuts have the text and language of prepare", key, field)
    open_reader = partial(
        _open_dataset,
        options["dataset"],
        fields=[] if options.get("metadata_only", False) else options.get("fields"),
        codec=options.get("codec"),
        decode_threads=options.get("decode_threads", 0),
        sidecars=options.get("sidecars"),
        **{key: options[key] for key in ("on_damage", "max_damaged", "cache_dir", "cache_gib") if key in options},
    )
    source = PartitionedCuts(open_reader, options)
    return CutSet(source).map(partial(_as_nemo_expects, speaker_tags=options.get("speaker_tags", "kept"))), True


@data_type_parser(DIVIDED)
def read_divided(entry: DictConfig) -> tuple[CutSet, bool]:
    """Return the examples of an entry of a type of NeMo's, divided among all readers as our own cuts are."""
    options: dict[str, Any] = OmegaConf.to_container(entry, resolve=True)  # type: ignore[assignment]
    source = PartitionedCuts(partial(open_examples, options), options)
    return CutSet(source).map(_as_nemo_expects, apply_fn=None), True


def _open_dataset(dataset: str | Location, **options: Any) -> SharReader:
    return open_shar(dataset, **options).data


def entry_size(entry: Mapping[str, Any]) -> int:
    """Return the number of examples of an entry as ``prepare_settings`` leaves it; filters may leave fewer."""
    return len(open_examples(entry) if entry["type"] == DIVIDED else _open_dataset(entry_directory(entry), fields=[]))


def _as_nemo_expects(cut: Any, speaker_tags: str = "kept") -> Any:
    """Put what NeMo's filters and datasets look for where they look for it, and return the cut; or any other example.

    ``validation_status`` is sought in the cut, and is a manifest key, which we keep in the supervision. A ``cer`` or
    ``context_speaker_similarity`` of null would be compared with a number. ``speaker_tags="nemo"`` writes the
    language of a speaker tag as MagpieTTSLhotseDataset wants it: ``en_US`` for ``en-US``.
    """
    for supervision in getattr(cut, "supervisions", ()):
        custom = supervision.custom or {}
        for key in ("cer", "context_speaker_similarity"):
            if key in custom and custom[key] is None:
                del custom[key]
        if "validation_status" in custom and not cut.has_custom("validation_status"):
            cut.validation_status = custom["validation_status"]
        if speaker_tags == "nemo" and supervision.speaker is not None:
            before, found, rest = supervision.speaker.partition("Language:")
            language, space, after = rest.partition(" ")
            supervision.speaker = before + found + nemo_language(language) + space + after
    return cut
