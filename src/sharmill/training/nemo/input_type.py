"""The types that sharmill adds to NeMo's ``input_cfg``; importing this module registers them.

``type: sharmill`` reads our datasets. Scripts that call NeMo's loader themselves need nothing but the import.
``type: tts_text`` is text for hybrid ASR-TTS. Text, conversations, NeMo's manifests and lhotse's Shar are divided among
ranks and workers, with exact states, as shards of our reader. NeMo reads each of these shards itself: its parser of the
type is called with the files of one shard, once through and not shuffled. Which shards are read when, and which of
their examples this process has, our reader decides. Examples of other readers are made and passed over, so more files
than readers are read with less work.
"""

import copy
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import IO, Annotated, Any, Final

import msgspec
from lhotse import CutSet
from lhotse.serialization import open_best
from nemo.collections.common.data.lhotse.cutset import data_type_parser, get_parser_fn
from nemo.collections.common.data.lhotse.nemo_adapters import LazyNeMoTarredIterator, expand_sharded_filepaths
from nemo.collections.common.data.lhotse.text_adapters import TextExample
from omegaconf import DictConfig, OmegaConf

from sharmill.errors import ConfigError
from sharmill.files.storage import checksum_bytes
from sharmill.manifest import nemo_language
from sharmill.shar import open_shar
from sharmill.shar.layout import CUTS
from sharmill.shar.reading.cuts import POSITION
from sharmill.shar.reading.iteration import ReadOptions, SharReader
from sharmill.shar.reading.shard_source import ShardSource
from sharmill.shar.rebuild import find_shards
from sharmill.sources.files import iterate_lines, open_lines
from sharmill.training.nemo.classic import DIVIDED, TYPES, check_entry
from sharmill.training.nemo.loader import PartitionedCuts
from sharmill.training.nemo.settings import check_files, texts_in

_Text = Annotated[str, msgspec.Meta(pattern=r"\S")]
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
        self.num_shards = len(self._shards)

    @property
    def identity(self) -> dict[str, Any]:
        """The type, and the names and sizes of its files."""
        if self._tarred is not None:
            names = [*self._tarred.paths, *self._tarred.tar_paths]
        else:
            names = [name for shard in self._shards for name in texts_in(shard)]
        files = [(Path(name).name, Path(name).stat().st_size if Path(name).exists() else None) for name in names]
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
    columns = {key: expand_sharded_filepaths(entry[key]) for key in TYPES[kind].files if entry.get(key) is not None}
    lengths = {key: len(names) for key, names in columns.items()}
    told = " and ".join(f"{count} files as {key}" for key, count in lengths.items())
    if len(set(lengths.values())) > 1:
        raise ConfigError(f"input_cfg: type {kind} has {told}: there must be as many of each", code="bad_config_value")
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
    open_reader = partial(
        _open_dataset,
        options["dataset"],
        fields=[] if options.get("metadata_only", False) else options.get("fields"),
        codec=options.get("codec"),
        decode_threads=options.get("decode_threads", 0),
        sidecars=options.get("sidecars"),
        **{key: options[key] for key in ("on_damage", "max_damaged") if key in options},
    )
    source = PartitionedCuts(open_reader, options)
    return CutSet(source).map(partial(_as_nemo_expects, speaker_tags=options.get("speaker_tags", "kept"))), True


@data_type_parser(DIVIDED)
def read_divided(entry: DictConfig) -> tuple[CutSet, bool]:
    """Return the examples of an entry of a type of NeMo's, divided among all readers as our own cuts are."""
    options: dict[str, Any] = OmegaConf.to_container(entry, resolve=True)  # type: ignore[assignment]
    source = PartitionedCuts(partial(open_examples, options), options)
    return CutSet(source).map(_as_nemo_expects, apply_fn=None), True


def _open_dataset(dataset: str, **options: Any) -> SharReader:
    return open_shar(dataset, **options).data


def entry_size(entry: Mapping[str, Any]) -> int:
    """Return the number of examples of an entry as ``prepare_settings`` leaves it; filters may leave fewer."""
    return len(open_examples(entry) if entry["type"] == DIVIDED else _open_dataset(entry["dataset"], fields=[]))


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
