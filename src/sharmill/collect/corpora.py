"""Corpora in the form in which they are published, read by lhotse's recipes, or by an own one where lhotse has none.

Nothing is downloaded. Recipes look for files, texts and speakers; headers of audio are read with sharmill's own reader,
so that one file that cannot be read ends no recipe. They run in a process of their own, which may import torch.
"""

import importlib
import inspect
import io
import itertools
import logging
import multiprocessing
import os
import pkgutil
import re
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures.process import BrokenProcessPool
from contextlib import nullcontext, redirect_stderr, suppress
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Final

import msgspec

from sharmill.audio.files import probe
from sharmill.errors import ConfigError, FatalError, RejectRecord, one_line
from sharmill.files.host import new_process
from sharmill.manifest import write_lines
from sharmill.registry import nearest

# Errors of recipes about files that are not as they expect them: they have no classes of their own for it.
_RECIPE_ERRORS: Final = (AssertionError, OSError, LookupError, ValueError, TypeError, AttributeError, RuntimeError)
# Names of languages that lhotse's recipes give, and the codes that speaker tags have.
_LANGUAGES: Final = {
    "arabic": "ar", "bengali": "bn", "cantonese": "yue", "chinese": "zh", "czech": "cs", "dutch": "nl", "english": "en",
    "french": "fr", "german": "de", "italian": "it", "japanese": "ja", "korean": "ko", "mandarin": "zh", "polish": "pl",
    "portuguese": "pt", "russian": "ru", "spanish": "es",
}  # fmt: skip
# Name of the file that has the warnings of a recipe.
RECIPE_LOG: Final = "recipe.log"
# NeMo's name of a part of Fisher, and LDC's names of its audio and of its texts.
_FISHER: Final = (
    ("LDC2004S13-Part1", "LDC2004S13", "LDC2004T19"),
    ("LDC2005S13-Part2", "LDC2005S13", "LDC2005T19"),
)
_AN4_LINE: Final = re.compile(r"(.*)\(([^()\s]+)\)\s*")


def _forgive_headers() -> None:
    """Have lhotse read headers with sharmill's reader; a file that this refuses counts as a long one of two channels.

    So a recipe gets past it, with all of its segments, and they are rejected where all records are checked. SPHERE
    needs no sph2pipe. It holds until the process ends.
    """
    from lhotse.audio import backend

    class Headers(backend.AudioBackend):
        def info(self, path_or_fd: Any, **_: Any) -> backend.LibsndfileCompatibleAudioInfo:
            channels, num_samples, rate = 2, 10**6 * 16000, 16000
            with suppress(RejectRecord):
                info = probe(path_or_fd)
                channels, num_samples, rate = info.channels, info.num_samples, info.sampling_rate
            return backend.LibsndfileCompatibleAudioInfo(channels, num_samples, rate, num_samples / rate)

    backend.set_current_audio_backend(Headers())


def _parts_of_libritts(directory: Path) -> dict[str, Any]:
    """Return the parts of LibriTTS that are there: by itself the recipe wants them all."""
    from lhotse.recipes.libritts import LIBRITTS

    found = [name for name in LIBRITTS if (directory / name).is_dir()]
    if not found:
        raise ConfigError(f"{directory} has none of the folders {', '.join(LIBRITTS)}; name the folder that has",
                          code="missing_input")  # fmt: skip
    return {"dataset_parts": found}


def _form_of_vctk(directory: Path) -> dict[str, Any]:
    """Return the published form of VCTK that a folder has: version 0.92 is FLAC of two microphones."""
    return {"use_edinburgh_vctk_url": (directory / "wav48_silence_trimmed").is_dir()}


def _read_hifitts(directory: Path) -> dict[str, Any]:
    """Return the partitions of HiFi-TTS, each read by itself: lhotse's recipe may give one the name of another."""
    from lhotse.recipes.hifitts import prepare_single_partition

    _forgive_headers()
    parts = {}
    for path in sorted(directory.glob("*_manifest_*.json")):
        speaker, _, quality, split = path.stem.split("_")
        recordings, supervisions = prepare_single_partition(path, directory, speaker, quality)
        # As in the names of the partitions: with the quality, which the recordings of a speaker differ in.
        for supervision in supervisions:
            supervision.custom["speaker_name"] = supervision.speaker
            supervision.speaker = f"{speaker}_{quality}"
        parts[f"{speaker}_{quality}_{split}"] = {"recordings": recordings, "supervisions": supervisions}
    if not parts:
        raise ValueError("there are no files such as 92_manifest_clean_train.json")
    return parts


def _read_fisher(directory: Path) -> dict[str, Any]:
    """Return the recordings and supervisions of the parts of Fisher that are there.

    Either as LDC names them, LDC2004S13 with LDC2004T19 and LDC2005S13 with LDC2005T19, or in the two folders of NeMo's
    documentation, LDC2004S13-Part1 and LDC2005S13-Part2, which lhotse's recipe does not know: it gets links.
    """
    from lhotse import RecordingSet, SupervisionSet
    from lhotse.recipes.fisher_english import prepare_fisher_english

    _forgive_headers()
    with tempfile.TemporaryDirectory(prefix="sharmill-fisher-") as scratch:
        corpus = Path(scratch) / "corpus"
        found = [names for part, *names in _FISHER if _link_fisher(directory, part, names, corpus)]
        if not found:
            raise ValueError(f"there is none of the folders {', '.join(name for row in _FISHER for name in row[:2])}")
        audio, texts = map(list, zip(*found, strict=True))
        made = prepare_fisher_english(corpus, Path(scratch) / "out", audio, texts, absolute_paths=True)
        recordings = list(made["recordings"])
        for part in (part for recording in recordings for part in recording.sources):
            part.source = os.path.realpath(part.source)
        return {
            "recordings": RecordingSet.from_recordings(recordings),
            "supervisions": SupervisionSet.from_segments(list(made["supervisions"])),
        }


def _link_fisher(directory: Path, part: str, names: list[str], corpus: Path) -> bool:
    """Make links to a part of Fisher under the names that LDC gives it; return False if it is not there."""
    audio, texts = names
    home = directory / (audio if (directory / audio).is_dir() else part)
    if not home.is_dir():
        return False
    (corpus / audio).mkdir(parents=True)
    for folder in (*home.iterdir(), directory / texts):
        if (folder / "data/trans").is_dir():
            (corpus / texts).symlink_to(folder)
        elif (folder / "audio").is_dir():
            (corpus / audio / folder.name).symlink_to(folder)
    return True


def _read_an4(directory: Path) -> dict[str, list[dict[str, Any]]]:
    """Return the records of AN4 by split: ``etc/an4_<split>.transcription`` and ``.fileids``, SPHERE below ``wav``."""
    directory = directory if (directory / "etc").is_dir() or not (directory / "an4").is_dir() else directory / "an4"
    splits = {}
    for split in ("train", "test"):
        lists = [directory / "etc" / f"an4_{split}.{kind}" for kind in ("fileids", "transcription")]
        if any(path.exists() for path in lists):
            files, lines = (
                [line.strip() for line in path.read_text("utf-8").splitlines() if line.strip()] for path in lists
            )
            splits[split] = [_an4_record(directory, file, line) for file, line in zip(files, lines, strict=True)]
    if not splits:
        raise ValueError(f"there is no {directory / 'etc' / 'an4_train.fileids'}")
    return splits


def _an4_record(directory: Path, file: str, line: str) -> dict[str, Any]:
    """Return the record of a file, and of the line with its text, such as ``<s> R U B OUT </s> (an251-fash-b)``."""
    path = file.removesuffix(".sph")
    name, match = path.rpartition("/")[2], _AN4_LINE.fullmatch(line)
    if match is None or match[2] != name:
        raise ValueError(f"the line {line[:80]!r} of a transcription does not end in ({name}), as the fileids do")
    speaker = name.partition("-")[2].partition("-")[0]
    record = {
        "utterance_id": name,
        "audio_filepath": str(directory / "wav" / f"{path}.sph"),
        "text": " ".join(word for word in match[1].split() if word not in ("<s>", "</s>", "<sil>")),
        "speaker": speaker or name,
        "language": "en",
    }
    gender = {"f": "female", "m": "male"}.get(speaker[:1])
    return record | ({"gender": gender} if gender else {})


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
        Corpus(recipe="libritts", dataset="LibriTTS", language="en", adapt=_parts_of_libritts),
        Corpus(recipe="librittsr", dataset="LibriTTS-R", language="en", adapt=_parts_of_libritts),
        Corpus(recipe="hifitts", dataset="HiFiTTS", language="en", read=_read_hifitts),
        Corpus(recipe="vctk", dataset="VCTK", language="en", adapt=_form_of_vctk),
        Corpus(recipe="ljspeech", dataset="LJSpeech", language="en", speaker="LJ"),
        Corpus(recipe="aishell", dataset="AISHELL-1", language="zh"),
        Corpus(recipe="aishell2", dataset="AISHELL-2", language="zh"),
        Corpus(recipe="fisher_english", dataset="Fisher", language="en", read=_read_fisher),
        Corpus(recipe="eval2000", dataset="HUB5", language="en"),
        Corpus(recipe="an4", dataset="AN4", language="en", read=_read_an4),
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
    import lhotse.recipes

    modules = [module.name for module in pkgutil.iter_modules(lhotse.recipes.__path__) if module.name != "utils"]
    functions = [name.removeprefix("prepare_") for name in dir(lhotse.recipes) if name.startswith("prepare_")]
    recipes_of_lhotse = {_normalise(recipe): recipe for recipe in dict.fromkeys([*functions, *modules])}
    if short not in recipes_of_lhotse:
        raise ConfigError(
            f"--from {name}: there is no such corpus{nearest(short, [*CORPORA, *recipes_of_lhotse.values()])}",
            code="unknown_name",
        )
    recipe = recipes_of_lhotse[short]
    return Corpus(recipe=recipe, dataset=recipe)


def _normalise(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


@dataclass(frozen=True)
class Found:
    """The result of a recipe.

    Attributes:
        dataset: the name of the dataset in speaker tags.
        defaults: keys of records that have none of their own.
        splits: by name, the keys of the source that reads the records; files by their names.
    """

    dataset: str
    defaults: dict[str, str]
    splits: dict[str, dict[str, str]]


def run_recipe(name: str, directory: Path, options: dict[str, Any], splits: tuple[str, ...], folder: Path) -> Found:
    """Run the recipe of a corpus in a process of its own.

    Args:
        name: of the corpus, as ``find_corpus`` takes it.
        directory: the folder of the corpus.
        options: further arguments of the recipe.
        splits: names or patterns of the splits that are wanted; none for all.
        folder: for manifests of the splits, in the order of paths, and the warnings of the recipe in ``RECIPE_LOG``.

    Raises:
        ConfigError: the folder has not the form that the recipe expects, or there is no such split.
        FatalError: the process was killed.
    """
    with new_process("forkserver") as pool:
        try:
            return pool.submit(_run_recipe, name, directory, options, splits, folder).result()
        except BrokenProcessPool as error:
            raise FatalError(
                f"the recipe {name} was killed, as the kernel does when memory runs out; run the same command again, "
                "with more memory",
                code="process_ended",
            ) from error


def _run_recipe(name: str, directory: Path, options: dict[str, Any], splits: tuple[str, ...], folder: Path) -> Found:
    # Processes that a recipe starts have the reader of headers that is set in this one.
    multiprocessing.set_start_method("fork", force=True)
    # Recipes warn of what they leave out; their progress bars are for a terminal only.
    logging.basicConfig(filename=folder / RECIPE_LOG, encoding="utf-8", format="%(message)s", force=True)
    logging.captureWarnings(True)
    with nullcontext() if sys.stderr.isatty() else redirect_stderr(io.StringIO()):
        corpus = find_corpus(name)
        try:
            parts = _flatten(_call_recipe(corpus, directory, options, folder / "recipe"))
            names = sorted(parts)
            for pattern in splits:
                if not any(fnmatchcase(name, pattern) for name in names):
                    there = ", ".join(names) if any(names) else "none"
                    raise ConfigError(
                        f"--splits {pattern}: the corpus has no such split; there are: {there}", code="bad_usage"
                    )
            chosen = [name for name in names if not splits or any(fnmatchcase(name, pattern) for pattern in splits)]
            written = {split: _write_part(parts[split], folder / f"split-{n}") for n, split in enumerate(chosen)}
        except ImportError as error:
            package = error.name or str(error)
            raise ConfigError(
                f"the recipe {corpus.recipe} needs the package {package}, which is not installed: pip install "
                f"{package}",
                code="missing_package",
            ) from error
        except _RECIPE_ERRORS as error:
            missing = "there is no " if isinstance(error, KeyError) else ""
            raise ConfigError(
                f"the recipe {corpus.recipe} cannot read {directory}: {missing}{one_line(error)}; name the folder that "
                "the corpus was unpacked into, as it was published",
                code="bad_manifest",
            ) from error
    defaults = {"speaker": corpus.speaker, "language": corpus.language}
    return Found(
        corpus.dataset,
        {key: value for key, value in defaults.items() if value is not None},
        {split: files for split, files in written.items() if files},
    )


def _write_part(part: Any, path: Path) -> dict[str, str]:
    """Write a split, which is records or recordings and supervisions, in an order that folders do not determine.

    Return the names of the files by the keys of the source that reads them; none if there are no records.
    """
    files: dict[str, list[Any]] = {}
    if isinstance(part, list):
        files["manifest"] = sorted(part, key=lambda record: record["audio_filepath"])
    else:
        files["recordings"] = sorted(part[0], key=_paths)
        if part[1] is not None:
            paths = {recording.id: _paths(recording) for recording in files["recordings"]}
            files["supervisions"] = sorted(
                part[1],
                key=lambda entry: (paths[entry.recording_id], entry.start, str(entry.channel), entry.text or ""),
            )
            for entry in files["supervisions"]:
                entry.language = _LANGUAGES.get(str(entry.language).lower(), entry.language)
    if not all(files.values()):
        return {}
    for kind, records in files.items():
        found = (record if isinstance(record, dict) else record.to_dict() for record in records)
        write_lines(path.with_suffix(f".{kind}"), map(msgspec.json.encode, found))
    return {kind: path.with_suffix(f".{kind}").name for kind in files}


def _paths(recording: Any) -> list[str]:
    return [str(source.source) for source in recording.sources]


def _call_recipe(corpus: Corpus, directory: Path, options: dict[str, Any], scratch: Path) -> Any:
    function = f"prepare_{corpus.recipe}"
    modules = map(importlib.import_module, ("lhotse.recipes", f"lhotse.recipes.{corpus.recipe}"))
    recipe = corpus.read or next((getattr(module, function) for module in modules if hasattr(module, function)), None)
    if recipe is None:
        raise ConfigError(f"lhotse's recipe {corpus.recipe} has no function {function}", code="unknown_name")
    if corpus.read is None:
        _forgive_headers()
    parameters = dict(itertools.islice(inspect.signature(recipe).parameters.items(), 1, None))
    needed = [
        name
        for name, p in parameters.items()
        if p.default is p.empty and p.kind not in (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    ]
    given: dict[str, Any] = {"absolute_paths": True} if "absolute_paths" in parameters else {}
    given |= {"output_dir": scratch} if "output_dir" in needed else {}
    given |= (corpus.adapt(directory) if corpus.adapt else {}) | options
    names = [name for name in parameters if name not in ("output_dir", "absolute_paths", "num_jobs")]
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
    return recipe(directory, **given)


def _flatten(result: Any, name: str = "") -> dict[str, Any]:
    """Return the splits of what a recipe returns: mappings of mappings, with recordings and supervisions inside."""
    if isinstance(result, list):
        return {name: result}
    if not isinstance(result, dict):
        raise ValueError(f"it returned {type(result).__name__}, and no recordings and supervisions")
    if "recordings" in result:
        return {name: (result["recordings"], result.get("supervisions"))}
    parts: dict[str, Any] = {}
    for key, value in result.items():
        parts |= _flatten(value, f"{name}-{key}" if name else str(key))
    return parts
