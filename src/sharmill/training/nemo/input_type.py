"""Entry types that sharmill adds to NeMo's ``input_cfg``; importing this module registers them.

The type ``sharmill`` reads sharmill's datasets. Scripts that call NeMo's loader themselves only need this import. The
type ``tts_text`` reads text for hybrid ASR-TTS models. ``DIVIDED`` is used internally for text, conversations, NeMo's
manifests and lhotse's Shar, which ``sharmill.training.nemo.examples`` reads.
"""

import logging
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
from lhotse import CutSet
from nemo.collections.common.data.lhotse.cutset import data_type_parser
from nemo.collections.common.data.lhotse.nemo_adapters import expand_sharded_filepaths
from nemo.collections.common.data.lhotse.text_adapters import TextExample
from omegaconf import DictConfig, OmegaConf

from sharmill.errors import ConfigError
from sharmill.files.location import Location
from sharmill.manifest import nemo_language
from sharmill.shar import open_shar
from sharmill.shar.reading.iteration import SharReader
from sharmill.sources.files import iterate_lines
from sharmill.training.nemo.entries import DIVIDED, check_entry, entry_directory
from sharmill.training.nemo.examples import open_examples
from sharmill.training.nemo.partition import PartitionedCuts

log = logging.getLogger(__name__)

_Text = Annotated[str, msgspec.Meta(pattern=r"\S")]
_SPOKEN: Final = ("tts_text_normalized", "tts_text")


@data_type_parser("tts_text")
def read_tts_text(entry: DictConfig) -> tuple[CutSet, bool]:
    """Return the lines of manifests as TextExamples, with the ``tts_text`` keys of each line as attributes.

    Returns:
        The examples, and True, because they are a stream.

    Raises:
        ConfigError: a line is not a valid record; raised while iterating.
    """
    examples = CutSet(_TtsTexts(expand_sharded_filepaths(entry.manifest_filepath), entry.get("language")))
    return (examples if entry.get("force_finite", False) else examples.repeat(preserve_id=True)), True


class _TtsTexts:
    """The examples of manifests; each iteration is one pass over them."""

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
    """A line of a manifest: ASR recognizes ``text``, and TTS speaks ``tts_text_normalized`` or ``tts_text``."""

    text: _Text
    lang: _Text | None = None
    tts_text_normalized: _Text | None = None
    tts_text: _Text | None = None
    audio_filepath: Any = None

    def __post_init__(self) -> None:
        if self.audio_filepath is not None:
            raise ValueError("it has audio_filepath, but tts_text is only for text without audio: use type nemo")
        if self.tts_text_normalized is None and self.tts_text is None:
            raise ValueError("it has neither tts_text_normalized nor tts_text for the TTS model to speak: add one")


@data_type_parser("sharmill")
def read_sharmill(entry: DictConfig) -> tuple[CutSet, bool]:
    """Return the cuts of one entry, repeated endlessly unless ``force_finite`` or ``metadata_only`` is set.

    Returns:
        The cuts, and True, because they are a stream like tarred data and text.

    Raises:
        ConfigError: an option is unknown, or the dataset, a field or the codec does not exist.
    """
    options: dict[str, Any] = OmegaConf.to_container(entry, resolve=True)  # type: ignore[assignment]
    check_entry(options, {})
    for key, default in {"text_field": "text", "lang_field": "lang"}.items():
        if (field := options.get(key, default)) != default:
            log.warning(
                "%s: %s has no effect on type sharmill, which uses the text and language that prepare stored",
                key,
                field,
            )
    open_reader = partial(
        _open_dataset,
        options["dataset"],
        fields=[] if options.get("metadata_only", False) else options.get("fields"),
        codec=options.get("codec"),
        decode_threads=options.get("decode_threads", 0),
        sidecars=options.get("sidecars"),
        **{
            key: options[key]
            for key in ("where", "on_damage", "max_damaged", "cache_dir", "cache_gib")
            if key in options
        },
    )
    source = PartitionedCuts(open_reader, options)
    return CutSet(source).map(partial(_as_nemo_expects, speaker_tags=options.get("speaker_tags", "kept"))), True


@data_type_parser(DIVIDED)
def read_divided(entry: DictConfig) -> tuple[CutSet, bool]:
    """Return the examples of an entry of NeMo's types, divided among all readers like cuts of type sharmill.

    Returns:
        The examples, and True, because they are a stream.
    """
    options: dict[str, Any] = OmegaConf.to_container(entry, resolve=True)  # type: ignore[assignment]
    source = PartitionedCuts(partial(open_examples, options), options)
    return CutSet(source).map(_as_nemo_expects, apply_fn=None), True


def _open_dataset(dataset: str | Location, **options: Any) -> SharReader:
    return open_shar(dataset, **options).data


def entry_size(entry: Mapping[str, Any]) -> int:
    """Return the number of examples, before filters, of an entry prepared by ``prepare_settings``."""
    return len(open_examples(entry) if entry["type"] == DIVIDED else _open_dataset(entry_directory(entry), fields=[]))


def _as_nemo_expects(cut: Any, speaker_tags: str = "kept") -> Any:
    """Adapt a cut to NeMo's filters and datasets, and return it; other examples are returned unchanged.

    NeMo expects ``validation_status`` as an attribute of the cut rather than of the supervision. Null values of ``cer``
    and ``context_speaker_similarity`` are removed, because NeMo would compare them with numbers. With
    ``speaker_tags="nemo"``, the language of a speaker tag is written as MagpieTTSLhotseDataset expects it: ``en_US``
    for ``en-US``.
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
