"""Corpora in the form in which they are published, read by lhotse's recipes, or by an own one where lhotse has none.

Nothing is downloaded. Recipes look for files, texts and speakers; headers of audio are read with sharmill's own reader,
so that one file that cannot be read ends no recipe.
"""

from __future__ import annotations

import importlib
import inspect
import io
import logging
import pkgutil
import re
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext, redirect_stderr
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from sharmill.collect import recipes
from sharmill.errors import ConfigError, RejectRecord
from sharmill.manifest import Channel
from sharmill.registry import nearest
from sharmill.sources.lhotse_records import decode_recording, decode_supervision, recording_record, supervision_record

if TYPE_CHECKING:
    from lhotse import RecordingSet, SupervisionSet

    Part = tuple[RecordingSet, SupervisionSet | None]
    Records = list[dict[str, Any]]

# Errors of recipes about files that are not as they expect them: they have no classes of their own for it.
_RECIPE_ERRORS: Final = (AssertionError, OSError, LookupError, ValueError, TypeError, AttributeError, RuntimeError)
# Names of languages that lhotse's recipes give, and the codes that speaker tags have.
_LANGUAGES: Final = {
    "arabic": "ar", "bengali": "bn", "cantonese": "yue", "chinese": "zh", "czech": "cs", "dutch": "nl", "english": "en",
    "french": "fr", "german": "de", "italian": "it", "japanese": "ja", "korean": "ko", "mandarin": "zh", "polish": "pl",
    "portuguese": "pt", "russian": "ru", "spanish": "es",
}  # fmt: skip
# Stands in a record that a recipe gives and that cannot be used: reason and sentence.
REJECTED: Final = "_rejected"
_GIVEN: Final = ("output_dir", "absolute_paths", "num_jobs")


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """A corpus that a recipe reads.

    Attributes:
        recipe: its name in lhotse, or that of an own one.
        dataset: its name in speaker tags.
        language, speaker: of records whose recipe names none.
        adapt: makes further arguments of the recipe from the folder of the corpus.
        read: an own recipe, in the place of lhotse's.
    """

    recipe: str
    dataset: str
    language: str | None = None
    speaker: str | None = None
    adapt: Callable[[Path], dict[str, Any]] | None = field(default=None, compare=False)
    read: Callable[[Path], dict[str, Any]] | None = field(default=None, compare=False)


# Under the names of lhotse's recipes.
CORPORA: Final = {
    corpus.recipe: corpus
    for corpus in (
        Corpus(recipe="librispeech", dataset="LibriSpeech", language="en"),
        Corpus(recipe="libritts", dataset="LibriTTS", language="en", adapt=recipes.parts_of_libritts),
        Corpus(recipe="librittsr", dataset="LibriTTS-R", language="en", adapt=recipes.parts_of_libritts),
        Corpus(recipe="hifitts", dataset="HiFiTTS", language="en", read=recipes.read_hifitts),
        Corpus(recipe="vctk", dataset="VCTK", language="en", adapt=recipes.form_of_vctk),
        Corpus(recipe="ljspeech", dataset="LJSpeech", language="en", speaker="LJ"),
        Corpus(recipe="aishell", dataset="AISHELL-1", language="zh"),
        Corpus(recipe="aishell2", dataset="AISHELL-2", language="zh"),
        Corpus(recipe="fisher_english", dataset="Fisher", language="en", read=recipes.read_fisher),
        Corpus(recipe="eval2000", dataset="HUB5", language="en"),
        Corpus(recipe="an4", dataset="AN4", language="en", read=recipes.read_an4),
    )
}
# Other names of the same corpora, as NeMo's documentation and people write them, without blanks and signs.
_ALIASES: Final = {
    "aishell1": "aishell",
    "fisher": "fisher_english",
    "fisherenglish": "fisher_english",
    "fisherenglishtrainingspeech": "fisher_english",
    "hub5": "eval2000",
    "2000hub5": "eval2000",
    "2000hub5englishevaluationspeech": "eval2000",
    "an4dataset": "an4",
}


def find_corpus(name: str) -> Corpus:
    """Return the corpus of a name: one of ``CORPORA``, another name of it, or that of any recipe of lhotse.

    >>> find_corpus("lhotse:librispeech").dataset, find_corpus("HUB5").recipe
    ('LibriSpeech', 'eval2000')

    Raises:
        ConfigError: there is none.
    """
    short = _normalise(name.removeprefix("lhotse:"))
    known = {_normalise(recipe): recipe for recipe in CORPORA} | _ALIASES
    if short in known:
        return CORPORA[known[short]]
    recipes_of_lhotse = {_normalise(recipe): recipe for recipe in _recipes_of_lhotse()}
    if short not in recipes_of_lhotse:
        raise ConfigError(
            f"--from {name}: there is no such corpus{nearest(short, [*CORPORA, *recipes_of_lhotse.values()])}",
            code="unknown_name",
        )
    recipe = recipes_of_lhotse[short]
    return Corpus(recipe=recipe, dataset=recipe)


def _normalise(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def _recipes_of_lhotse() -> list[str]:
    import lhotse.recipes

    modules = [module.name for module in pkgutil.iter_modules(lhotse.recipes.__path__) if module.name != "utils"]
    functions = [name.removeprefix("prepare_") for name in dir(lhotse.recipes) if name.startswith("prepare_")]
    return list(dict.fromkeys([*functions, *modules]))


def corpus_records(
    corpus: Corpus, directory: Path, options: dict[str, Any], splits: tuple[str, ...], channel: Channel, log: Path
) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Run the recipe of a corpus and yield its splits in the order of their names, each with its records, sorted.

    Args:
        directory: the folder of the corpus.
        options: further arguments of the recipe.
        splits: names or patterns of the splits that are wanted; none for all.
        channel: of segments of several.
        log: where to write the warnings of the recipe: utterances that it leaves out.

    Raises:
        ConfigError: the folder has not the form that the recipe expects, or there is no such split.
    """
    with tempfile.TemporaryDirectory(prefix="sharmill-recipe-") as scratch, _logging_warnings(log):
        with _explained_errors(corpus, directory):
            parts = _run_recipe(corpus, directory, options, Path(scratch) / "out")
        for name in _choose(splits, sorted(parts)):
            with _explained_errors(corpus, directory):
                records = sorted(_records_of(corpus, parts[name], channel), key=_place)
            yield name, records


@contextmanager
def _explained_errors(corpus: Corpus, directory: Path) -> Iterator[None]:
    """Turn the errors of a recipe into a ConfigError that says what it misses."""
    try:
        yield
    except ImportError as error:
        package = error.name or str(error)
        raise ConfigError(
            f"the recipe {corpus.recipe} needs the package {package}, which is not installed: pip install {package}",
            code="missing_package",
        ) from error
    except _RECIPE_ERRORS as error:
        what = " ".join(str(error).split()) or type(error).__name__
        what = f"there is no {what}" if isinstance(error, KeyError) else what
        raise ConfigError(
            f"the recipe {corpus.recipe} cannot read {directory}: {what}; name the folder that the corpus was unpacked "
            "into, as it was published",
            code="bad_manifest",
        ) from error


@contextmanager
def _logging_warnings(path: Path) -> Iterator[None]:
    """Write what recipes warn of into a file; their own progress bars are for a terminal only."""
    handler = logging.FileHandler(path, encoding="utf-8", delay=True)
    handler.setFormatter(logging.Formatter("%(message)s"))
    handler.setLevel(logging.WARNING)
    root = logging.getLogger()
    root.addHandler(handler)
    logging.captureWarnings(True)
    quiet = nullcontext() if sys.stderr.isatty() else redirect_stderr(io.StringIO())
    try:
        with quiet:
            yield
    finally:
        logging.captureWarnings(False)
        root.removeHandler(handler)
        handler.close()


def _choose(wanted: tuple[str, ...], names: list[str]) -> list[str]:
    for pattern in wanted:
        if not any(fnmatchcase(name, pattern) for name in names):
            there = ", ".join(names) if any(names) else "none"
            raise ConfigError(f"--splits {pattern}: the corpus has no such split; there are: {there}", code="bad_usage")
    return [name for name in names if not wanted or any(fnmatchcase(name, pattern) for pattern in wanted)]


def _run_recipe(corpus: Corpus, directory: Path, options: dict[str, Any], scratch: Path) -> dict[str, Part | Records]:
    """Return splits: lists of records of an own recipe, and pairs of recordings and supervisions of one of lhotse."""
    if corpus.read is not None:
        _refuse_options(corpus, options, [])
        return _flatten(corpus.read(directory))
    recipe = _load_recipe(corpus.recipe)
    parameters = inspect.signature(recipe).parameters
    first, *others = parameters
    _refuse_options(corpus, options, [name for name in others if name not in _GIVEN])
    arguments: dict[str, Any] = {"absolute_paths": True} if "absolute_paths" in parameters else {}
    if "output_dir" in parameters and parameters["output_dir"].default is inspect.Parameter.empty:
        arguments["output_dir"] = scratch
    arguments |= (corpus.adapt(directory) if corpus.adapt else {}) | options
    _require_arguments(corpus, [p for p in parameters.values() if p.name not in {first, *arguments}])
    with recipes.forgiving_headers():
        return _flatten(recipe(directory, **arguments))


def _load_recipe(name: str) -> Callable[..., Any]:
    package = importlib.import_module("lhotse.recipes")
    function = getattr(package, f"prepare_{name}", None)
    if function is None:
        function = getattr(importlib.import_module(f"lhotse.recipes.{name}"), f"prepare_{name}", None)
    if function is None:
        raise ConfigError(f"lhotse's recipe {name} has no function prepare_{name}", code="unknown_name")
    return function


def _refuse_options(corpus: Corpus, options: dict[str, Any], names: list[str]) -> None:
    for key in options:
        if key not in names:
            hint = nearest(key, names) if names else "; it takes none"
            raise ConfigError(f"--recipe-option {key}: the recipe {corpus.recipe} has no such argument{hint}",
                              code="bad_usage")  # fmt: skip


def _require_arguments(corpus: Corpus, parameters: Iterable[inspect.Parameter]) -> None:
    variadic = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    missing = [p.name for p in parameters if p.default is p.empty and p.kind not in variadic]
    if missing:
        raise ConfigError(
            f"the recipe {corpus.recipe} needs {', '.join(missing)}: give it as --recipe-option {missing[0]}=VALUE",
            code="bad_usage",
        )


def _flatten(result: Any, name: str = "") -> dict[str, Part | Records]:
    """Return the splits of what a recipe returns: mappings of mappings, with recordings and supervisions inside."""
    if isinstance(result, list):
        return {name: result}
    if not isinstance(result, dict):
        raise ValueError(f"it returned {type(result).__name__}, and no recordings and supervisions")
    if "recordings" in result:
        return {name: (result["recordings"], result.get("supervisions"))}
    parts: dict[str, Part | Records] = {}
    for key, value in result.items():
        parts |= _flatten(value, f"{name}-{key}" if name else str(key))
    return parts


def _records_of(corpus: Corpus, part: Part | Records, channel: Channel) -> Iterator[dict[str, Any]]:
    defaults = {"speaker": corpus.speaker, "language": corpus.language}
    if isinstance(part, list):
        yield from ({key: value for key, value in defaults.items() if value is not None} | row for row in part)
        return
    recordings, supervisions = part
    by_id = {recording.id: _decoded(decode_recording, recording) for recording in recordings}
    for entry in by_id.values() if supervisions is None else supervisions:
        name = entry.id if supervisions is None else entry.recording_id
        try:
            if supervisions is None:
                record = recording_record(entry, channel)
            else:
                record = supervision_record(by_id[name], _decoded(decode_supervision, entry), channel)
        except RejectRecord as reject:
            yield {REJECTED: [reject.reason, reject.detail], "audio_filepath": name}
        else:
            record = {key: value for key, value in defaults.items() if value is not None} | record
            if language := _LANGUAGES.get(str(record.get("language", "")).lower()):
                record["language"] = language
            yield record


def _decoded(decode: Callable[[bytes], Any], entry: Any) -> Any:
    """Return an object of lhotse as records are made of it."""
    return decode(msgspec.json.encode(entry.to_dict()))


def _place(record: dict[str, Any]) -> tuple[Any, ...]:
    # Recipes find files in the order of the file system, which is another one on the next machine.
    return record["audio_filepath"], record.get("offset", 0.0), record.get("channel", 0), record.get("text", "")


def write_records(path: Path, records: Iterable[dict[str, Any]]) -> None:
    """Write records as JSON lines."""
    with path.open("wb") as stream:
        for record in records:
            stream.write(msgspec.json.encode(record) + b"\n")
