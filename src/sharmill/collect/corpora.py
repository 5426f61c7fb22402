"""Corpora in the form in which they are published, read by lhotse's recipes, or by an own one where lhotse has none.

Nothing is downloaded. Recipes look for files, texts and speakers; headers of audio are read with sharmill's own reader,
so that one file that cannot be read ends no recipe. They run in a process of their own, which may import torch.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import io
import itertools
import logging
import multiprocessing
import pkgutil
import re
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext, redirect_stderr
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from sharmill.collect import recipes
from sharmill.collect.workers import map_in_order
from sharmill.errors import ConfigError
from sharmill.manifest import Channel, write_lines
from sharmill.registry import nearest
from sharmill.sources import Source
from sharmill.sources.lhotse import LhotseSource
from sharmill.sources.nemo import NemoSource

if TYPE_CHECKING:
    from lhotse import Recording, RecordingSet, SupervisionSet

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
_GIVEN: Final = ("output_dir", "absolute_paths", "num_jobs")
_VARIADIC: Final = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
# Name of the file that has the warnings of a recipe.
RECIPE_LOG: Final = "recipe.log"


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


@dataclass(frozen=True)
class Found:
    """The result of a recipe.

    Attributes:
        dataset: the name of the dataset in speaker tags.
        defaults: keys of records that have none of their own.
        splits: by name, the source that reads the records.
    """

    dataset: str
    defaults: dict[str, str]
    splits: dict[str, Source]


def read_corpus(
    name: str, directory: Path, options: dict[str, Any], splits: tuple[str, ...], channel: Channel, folder: Path
) -> Found:
    """Run the recipe of a corpus in a process of its own.

    Args:
        name: of the corpus, as ``find_corpus`` takes it.
        directory: the folder of the corpus.
        options: further arguments of the recipe.
        splits: names or patterns of the splits that are wanted; none for all.
        channel: of segments of several.
        folder: for manifests of the splits, in the order of paths, and the warnings of the recipe in ``RECIPE_LOG``.

    Raises:
        ConfigError: the folder has not the form that the recipe expects, or there is no such split.
        FatalError: the process was killed.
    """
    read = functools.partial(_read_corpus, directory, options, splits, channel, folder)
    (found,) = map_in_order(read, [name], 1)
    return found


def _read_corpus(
    directory: Path, options: dict[str, Any], splits: tuple[str, ...], channel: Channel, folder: Path, name: str
) -> Found:
    # Ctrl-C ends a recipe, however long it takes.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # Processes that a recipe starts have the reader of headers that is set in this one.
    multiprocessing.set_start_method("fork", force=True)
    # Recipes warn of what they leave out; their progress bars are for a terminal only.
    logging.basicConfig(filename=folder / RECIPE_LOG, encoding="utf-8", format="%(message)s", force=True)
    logging.captureWarnings(True)
    with nullcontext() if sys.stderr.isatty() else redirect_stderr(io.StringIO()):
        corpus = find_corpus(name)
        with _explained_errors(corpus, directory):
            parts = _run_recipe(corpus, directory, options, folder / "recipe")
            chosen = _choose(splits, sorted(parts))
            written = [
                (split, _write_part(parts[split], folder / f"split-{n}", channel)) for n, split in enumerate(chosen)
            ]
    defaults = {"speaker": corpus.speaker, "language": corpus.language}
    return Found(
        corpus.dataset,
        {key: value for key, value in defaults.items() if value is not None},
        {split: source for split, source in written if source is not None},
    )


def _write_part(part: Part | Records, path: Path, channel: Channel) -> Source | None:
    """Write the records of a split, or its recordings and supervisions, in an order that folders do not determine.

    Return the source that reads them, None if there are none.
    """
    if isinstance(part, list):
        records = sorted(part, key=lambda record: record["audio_filepath"])
        return NemoSource(manifest=_write(path, records), audio_root=None) if records else None
    recordings = sorted(part[0], key=_paths)
    supervisions = None
    if part[1] is not None:
        paths = {recording.id: _paths(recording) for recording in recordings}
        ordered = sorted(
            part[1], key=lambda entry: (paths[entry.recording_id], entry.start, str(entry.channel), entry.text or "")
        )
        for entry in ordered:
            entry.language = _LANGUAGES.get(str(entry.language).lower(), entry.language)
        supervisions = _write(path.with_suffix(".supervisions"), (entry.to_dict() for entry in ordered))
        recordings = recordings if ordered else []
    if not recordings:
        return None
    written = _write(path, (recording.to_dict() for recording in recordings))
    return LhotseSource(recordings=written, supervisions=supervisions, keep_ids=True, channel=channel, audio_root=None)


def _write(path: Path, records: Iterable[dict[str, Any]]) -> str:
    write_lines(path, map(msgspec.json.encode, records))
    return str(path)


def _paths(recording: Recording) -> list[str]:
    return [str(source.source) for source in recording.sources]


def _run_recipe(corpus: Corpus, directory: Path, options: dict[str, Any], scratch: Path) -> dict[str, Part | Records]:
    """Return splits: lists of records of an own recipe, and pairs of recordings and supervisions of one of lhotse."""
    recipe = corpus.read or _load_recipe(corpus.recipe)
    parameters = dict(itertools.islice(inspect.signature(recipe).parameters.items(), 1, None))
    needed = [name for name, p in parameters.items() if p.default is p.empty and p.kind not in _VARIADIC]
    given: dict[str, Any] = {"absolute_paths": True} if "absolute_paths" in parameters else {}
    given |= {"output_dir": scratch} if "output_dir" in needed else {}
    given |= (corpus.adapt(directory) if corpus.adapt else {}) | options
    names = [name for name in parameters if name not in _GIVEN]
    if unknown := [key for key in options if key not in names]:
        hint = nearest(unknown[0], names) if names else "; it takes none"
        raise ConfigError(
            f"--recipe-option {unknown[0]}: the recipe {corpus.recipe} has no such argument{hint}", code="bad_usage"
        )
    if missing := [name for name in needed if name not in given]:
        raise ConfigError(
            f"the recipe {corpus.recipe} needs {', '.join(missing)}: give it as --recipe-option {missing[0]}=VALUE",
            code="bad_usage",
        )
    return _flatten(recipe(directory, **given))


def _load_recipe(name: str) -> Callable[..., Any]:
    package = importlib.import_module("lhotse.recipes")
    function = getattr(package, f"prepare_{name}", None)
    if function is None:
        function = getattr(importlib.import_module(f"lhotse.recipes.{name}"), f"prepare_{name}", None)
    if function is None:
        raise ConfigError(f"lhotse's recipe {name} has no function prepare_{name}", code="unknown_name")
    recipes.forgive_headers()
    return function


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


def _choose(wanted: tuple[str, ...], names: list[str]) -> list[str]:
    for pattern in wanted:
        if not any(fnmatchcase(name, pattern) for name in names):
            there = ", ".join(names) if any(names) else "none"
            raise ConfigError(f"--splits {pattern}: the corpus has no such split; there are: {there}", code="bad_usage")
    return [name for name in names if not wanted or any(fnmatchcase(name, pattern) for pattern in wanted)]


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
