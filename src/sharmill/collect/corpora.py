"""Corpora in the form in which they are published, read by lhotse's recipes, or by an own one where lhotse has none.

lhotse downloads them if that is asked for. Recipes look for files, texts and speakers; headers of audio are read with
sharmill's own reader, so that one file that cannot be read ends no recipe. They run in a process of their own, which
may import torch.
"""

import importlib.util
import inspect
import io
import itertools
import logging
import multiprocessing
import os
import pkgutil
import re
import socket
import sys
import tempfile
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures.process import BrokenProcessPool
from contextlib import nullcontext, redirect_stderr, suppress
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import partial
from http.client import HTTPException
from pathlib import Path
from tarfile import TarError
from typing import Any, Final
from zipfile import BadZipFile

import msgspec

from sharmill.audio.files import probe
from sharmill.errors import ConfigError, FatalError, RejectRecord, one_line, refuse
from sharmill.files.disk import stopping_errors
from sharmill.files.host import new_process
from sharmill.manifest import write_lines
from sharmill.registry import nearest
from sharmill.sources.files import split_lines
from sharmill.sources.stretches import split_runs

# Errors of recipes about files that are not as they expect them: they have no classes of their own for it.
_RECIPE_ERRORS: Final = (AssertionError, OSError, LookupError, ValueError, TypeError, AttributeError, RuntimeError)
# Names of languages that lhotse's recipes give, and the codes that speaker tags have.
_LANGUAGES: Final = {
    "arabic": "ar", "bengali": "bn", "cantonese": "yue", "chinese": "zh", "czech": "cs", "dutch": "nl", "english": "en",
    "french": "fr", "german": "de", "italian": "it", "japanese": "ja", "korean": "ko", "mandarin": "zh", "polish": "pl",
    "portuguese": "pt", "russian": "ru", "spanish": "es",
}  # fmt: skip
# Seconds without a byte after which a server of a corpus is given up.
_NETWORK_TIMEOUT: Final = 60.0
# Name of the file that has the warnings of a recipe.
RECIPE_LOG: Final = "recipe.log"
# NeMo's name of a part of Fisher, and LDC's names of its audio and of its texts.
_FISHER: Final = (
    ("LDC2004S13-Part1", "LDC2004S13", "LDC2004T19"),
    ("LDC2005S13-Part2", "LDC2005S13", "LDC2005T19"),
)
# Text of an utterance that is left out, and that no joined utterances go over.
_LEFT_OUT: Final = "(("
# Splits of Fisher, by tenths of its recordings.
_FISHER_SPLITS: Final = (*["train"] * 8, "validation", "test")
# In texts of Fisher: tags such as [laughter], and <noise> of its second transcriber; and signs, of which none stays.
_FISHER_TAG: Final = re.compile(r"\[+[^\]]*\]+|<[^>]*>")
_FISHER_SIGNS: Final = str.maketrans(dict.fromkeys('()*;:"!&{},.-?'))
# The texts of HUB5 for scoring: recording, channel, speaker, begin, end, labels, text, with marks of asides and of
# hesitations.
_HUB5_TEXTS: Final = "hub5e00.english.000405.stm"
_STM_LINE: Final = re.compile(r"(\S+)\s+([AB])\s+(\S+)\s+([\d.]+)\s+([\d.]+)\s+(?:<[^>]*>)?(.*)")
_STM_HESITATION: Final = re.compile(r"\(%(?:hesitation|uh|ah)\)")
_STM_MARK: Final = re.compile(r"<[be]_aside>|[()-]")
_LIBRI_PARTS: Final = (
    "dev-clean", "dev-other", "test-clean", "test-other", "train-clean-100", "train-clean-360", "train-other-500",
)  # fmt: skip
_AN4_LINE: Final = re.compile(r"(.*)\(([^()\s]+)\)\s*")
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
    found = [name for name in _LIBRI_PARTS if (directory / name).is_dir()]
    if not found:
        raise ConfigError(f"{directory} has none of the folders {', '.join(_LIBRI_PARTS)}; name the folder that has",
                          code="missing_input")  # fmt: skip
    return {"dataset_parts": found}


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


def _read_fisher(directory: Path, *, remove_noises: bool = False) -> dict[str, Any]:
    """Return the recordings and supervisions of the parts of Fisher that are there, by split.

    Of the recordings, in the order of their names, the first 80 % are for training, and the next 10 % for validation.
    With ``remove_noises`` texts are as NeMo's script leaves them, and those that are uncertain are left out.

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
        utterances = list(made["supervisions"])
    if remove_noises:
        for utterance in utterances:
            utterance.text = _clean_fisher(utterance.text)
        num_left = sum(utterance.text in ("", _LEFT_OUT) for utterance in utterances)
        logging.warning("%d utterances are left out: noises only, or uncertain, in (( ))", num_left)
        utterances = [utterance for utterance in utterances if utterance.text]
    names = sorted(recording.id for recording in recordings)
    splits = {name: _FISHER_SPLITS[10 * number // len(names)] for number, name in enumerate(names)}
    return {
        split: {
            "recordings": RecordingSet.from_recordings(part for part in recordings if splits[part.id] == split),
            "supervisions": SupervisionSet.from_segments(
                part for part in utterances if splits[part.recording_id] == split
            ),
        }
        for split in dict.fromkeys(splits.values())
    }


def _clean_fisher(text: str) -> str:
    """Return a text without tags, punctuation and capitals, or ``_LEFT_OUT`` for an uncertain one.

    >>> _clean_fisher("[laughter] I have a 'Mini-van' [uh] on A._B._C.")
    'i have a minivan uh on a b c'
    """
    if "((" in text:
        return _LEFT_OUT
    text = text.lower().replace("[uh]", "uh").replace("[um]", "um")
    text = _FISHER_TAG.sub(" ", text).replace("._", " ").translate(_FISHER_SIGNS)
    return " ".join(re.sub(r"'([a-z]+)'", r"\1", text).split())


def _read_hub5(directory: Path, transcript_path: str | None = None) -> dict[str, Any]:
    """Return the recordings and supervisions of HUB5, with the clean texts of its STM; without it lhotse's.

    In the folders of LDC, LDC2002S09 and LDC2002T43, or in those of NeMo's script, hub5e_00 and 2000_hub5_eng_eval_tr.
    """
    from lhotse import Recording, RecordingSet, SupervisionSegment, SupervisionSet, fix_manifests
    from lhotse.recipes.eval2000 import prepare_eval2000

    _forgive_headers()
    texts = next(iter(sorted(directory.rglob(_HUB5_TEXTS))), None)
    if texts is None or transcript_path is not None:
        with tempfile.TemporaryDirectory(prefix="sharmill-hub5-") as scratch:
            return prepare_eval2000(directory, scratch, transcript_path, absolute_paths=True)
    files = sorted(directory.rglob("hub5e_00/english/*.sph"))
    if not files:
        raise ValueError("there is no hub5e_00/english with .sph files")
    utterances = []
    for number, line in enumerate(split_lines(texts.read_text("utf-8")), start=1):
        if line.startswith(";;") or "inter_segment_gap" in line.lower() or not line.strip():
            continue
        match = _STM_LINE.fullmatch(line.strip())
        if match is None:
            raise ValueError(f"line {number} of {texts} is no utterance of STM: {line[:80]!r}")
        recording, channel, speaker, start, end, text = match.groups()
        text = _STM_MARK.sub("", _STM_HESITATION.sub("uh", text.lower()))
        text = _LEFT_OUT if "ignore_time_segment_" in text else " ".join(text.split())
        utterances.append(
            SupervisionSegment(
                f"{recording}-{number}",
                recording,
                float(start),
                round(float(end) - float(start), 8),
                "AB".index(channel),
                text,
                speaker=speaker,
            )
        )
    fixed = fix_manifests(
        RecordingSet.from_recordings(map(Recording.from_file, files)), SupervisionSet.from_segments(utterances)
    )
    return dict(zip(("recordings", "supervisions"), fixed, strict=True))


def _join_utterances(utterances: list[Any], least: float) -> list[Any]:
    """Join consecutive utterances of a speaker and channel, with the pauses between, until they last ``least`` seconds.

    What is shorter before another speaker or ``_LEFT_OUT``, or at the end, is left out, with a warning.
    """

    def turn(utterance: Any) -> tuple[str, str, str, bool]:
        return utterance.recording_id, str(utterance.channel), str(utterance.speaker), utterance.text == _LEFT_OUT

    by_time = sorted(utterances, key=lambda part: (*turn(part)[:2], part.start, part.end))
    joined, num_left = [], sum(part.text != _LEFT_OUT for part in by_time)
    for (*_, is_left), parts in itertools.groupby(by_time, turn):
        for run in () if is_left else split_runs(parts, enough=least):
            seconds = max(part.end for part in run) - run[0].start
            if seconds >= least:
                text = " ".join(part.text for part in run if part.text)
                # An alignment of the first utterance alone would be taken for that of the whole text.
                whole = run[0] if len(run) == 1 else replace(run[0], alignment=None)
                joined.append(replace(whole, duration=round(seconds, 8), text=text))
                num_left -= len(run)
    if num_left:
        logging.warning("%d utterances are left out: joined they last less than %g s", num_left, least)
    return joined


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
                [line.strip() for line in split_lines(path.read_text("utf-8")) if line.strip()] for path in lists
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
        parts: those that lhotse downloads, by the names of splits; none if it knows no parts.
        folder: below the folder that lhotse says it has downloaded the corpus to.
        adapt: makes further arguments of the recipe from the folder of the corpus.
        read: an own recipe, in the place of lhotse's.
    """

    recipe: str
    dataset: str
    language: str | None = None
    speaker: str | None = None
    parts: tuple[str, ...] = ()
    folder: str = ""
    adapt: Callable[[Path], dict[str, Any]] | None = field(default=None, compare=False)
    read: Callable[..., dict[str, Any]] | None = field(default=None, compare=False)


_libritts = partial(Corpus, language="en", adapt=_parts_of_libritts, parts=_LIBRI_PARTS)
# Under the names of lhotse's recipes.
CORPORA: Final = {
    corpus.recipe: corpus
    for corpus in (
        Corpus(recipe="librispeech", dataset="LibriSpeech", language="en", parts=_LIBRI_PARTS),
        _libritts(recipe="libritts", dataset="LibriTTS", folder="LibriTTS"),
        _libritts(recipe="librittsr", dataset="LibriTTS-R", folder="LibriTTS_R"),
        Corpus(recipe="hifitts", dataset="HiFiTTS", language="en", read=_read_hifitts),
        Corpus(
            recipe="vctk",
            dataset="VCTK",
            language="en",
            # Version 0.92 is FLAC of two microphones.
            adapt=lambda directory: {"use_edinburgh_vctk_url": (directory / "wav48_silence_trimmed").is_dir()},
        ),
        Corpus(recipe="ljspeech", dataset="LJSpeech", language="en", speaker="LJ"),
        Corpus(recipe="aishell", dataset="AISHELL-1", language="zh"),
        Corpus(recipe="aishell2", dataset="AISHELL-2", language="zh"),
        Corpus(recipe="fisher_english", dataset="Fisher", language="en", read=_read_fisher),
        Corpus(recipe="eval2000", dataset="HUB5", language="en", read=_read_hub5),
        Corpus(recipe="an4", dataset="AN4", language="en", read=_read_an4),
    )
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


def run_recipe(
    name: str, directory: Path, options: dict[str, Any], splits: tuple[str, ...], folder: Path, *,
    min_segment: float | None = None, download: bool = False,
) -> Found:  # fmt: skip
    """Run the recipe of a corpus in a process of its own.

    Args:
        name: of the corpus, as ``find_corpus`` takes it.
        directory: the folder of the corpus, or the one that it is downloaded into.
        options: further arguments of the recipe.
        splits: names or patterns of the splits that are wanted; none for all.
        folder: for manifests of the splits, in the order of paths, and the warnings of the recipe in ``RECIPE_LOG``.
        min_segment: join utterances until they last so many seconds.
        download: download the corpus first, or what is missing of it.

    Raises:
        ConfigError: the folder has not the form that the recipe expects, there is no such split, or lhotse does not
            download the corpus.
        FatalError: the process was killed, or the download has failed.
    """
    with new_process("forkserver") as pool:
        try:
            return pool.submit(_run_recipe, name, directory, options, splits, folder, min_segment, download).result()
        except BrokenProcessPool as error:
            raise FatalError(
                f"the recipe {name} was killed, as the kernel does when memory runs out; run the same command again, "
                "with more memory",
                code="process_ended",
            ) from error


def _run_recipe(
    name: str, directory: Path, options: dict[str, Any], splits: tuple[str, ...], folder: Path,
    min_segment: float | None, download: bool,
) -> Found:  # fmt: skip
    # Processes that a recipe starts have the reader of headers that is set in this one.
    multiprocessing.set_start_method("fork", force=True)
    # Recipes warn of what they leave out; their progress bars are for a terminal only.
    logging.basicConfig(filename=folder / RECIPE_LOG, encoding="utf-8", format="%(message)s", force=True)
    logging.captureWarnings(True)
    with nullcontext() if sys.stderr.isatty() else redirect_stderr(io.StringIO()):
        corpus = find_corpus(name)
        try:
            parts = _flatten(_call_recipe(corpus, directory, options, folder / "recipe", splits if download else None))
            chosen = _choose(sorted(parts), splits)
            written = {
                split: _write_part(parts[split], folder / f"split-{n}", min_segment) for n, split in enumerate(chosen)
            }
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


def _choose(names: Sequence[str], splits: tuple[str, ...]) -> list[str]:
    """Return the names of the splits that are wanted."""
    there = ", ".join(names) if any(names) else "none"
    refuse(
        *(
            (
                not any(fnmatchcase(name, pattern) for name in names),
                f"--splits {pattern}: the corpus has no such split; there are: {there}",
            )
            for pattern in splits
        ),
        code="bad_usage",
    )
    return [name for name in names if not splits or any(fnmatchcase(name, pattern) for pattern in splits)]


def _write_part(part: Any, path: Path, min_segment: float | None) -> dict[str, str]:
    """Write a split, which is records or recordings and supervisions, in an order that folders do not determine.

    Return the names of the files by the keys of the source that reads them; none if there are no records.
    """
    files: dict[str, list[Any]] = {}
    if min_segment is not None and (isinstance(part, list) or part[1] is None or len(part[1]) <= len(part[0])):
        raise ConfigError(
            "--min-segment joins the utterances of long recordings, which the corpus does not have; leave it out",
            code="bad_usage",
        )
    if isinstance(part, list):
        files["manifest"] = sorted(part, key=lambda record: record["audio_filepath"])
    else:
        files["recordings"] = sorted(part[0], key=_paths)
        if part[1] is not None:
            paths = {recording.id: _paths(recording) for recording in files["recordings"]}
            utterances = list(part[1]) if min_segment is None else _join_utterances(list(part[1]), min_segment)
            files["supervisions"] = sorted(
                (utterance for utterance in utterances if utterance.text != _LEFT_OUT),
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


def _call_recipe(
    corpus: Corpus, directory: Path, options: dict[str, Any], scratch: Path, downloads: tuple[str, ...] | None
) -> Any:
    """Return what the recipe makes; with ``downloads``, splits or none for all, of what is downloaded first."""
    recipe = corpus.read or _find_function("prepare", corpus.recipe)
    download = None if downloads is None else _find_function("download", corpus.recipe)
    if corpus.read is None:
        _forgive_headers()
    parameters = _further_parameters(recipe)
    of_download = {} if download is None else _further_parameters(download)
    needed = [
        name
        for name, p in parameters.items()
        if p.default is p.empty and p.kind not in (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    ]
    given: dict[str, Any] = {"absolute_paths": True} if "absolute_paths" in parameters else {}
    given |= {"output_dir": scratch} if "output_dir" in needed else {}
    given |= {key: value for key, value in options.items() if key in parameters}
    hidden = ("output_dir", "absolute_paths", "num_jobs", "force_download")
    names = [name for name in parameters | of_download if name not in hidden]
    if unknown := [key for key in options if key not in names]:
        hint = nearest(unknown[0], names) if names else "; it takes none"
        raise ConfigError(f"{unknown[0]}: the recipe {corpus.recipe} has no such argument{hint}", code="bad_usage")
    if missing := [name for name in needed if name not in given]:
        raise ConfigError(
            f"the recipe {corpus.recipe} needs {', '.join(missing)}: give it as --recipe-option {missing[0]}=VALUE",
            code="bad_usage",
        )
    if download is not None and downloads is not None:
        chosen: dict[str, Any] = {"dataset_parts": _choose(corpus.parts, downloads)} if corpus.parts else {}
        chosen |= {key: value for key, value in options.items() if key in of_download}
        directory = _download(corpus, download, directory, chosen)
    adapted = corpus.adapt(directory) if corpus.adapt else {}
    return recipe(directory, **adapted | given)


def _find_function(kind: str, recipe: str) -> Callable[..., Any]:
    """Return lhotse's function ``prepare_RECIPE`` or ``download_RECIPE``."""
    name = f"{kind}_{recipe}"
    modules = [path for path in ("lhotse.recipes", f"lhotse.recipes.{recipe}") if importlib.util.find_spec(path)]
    for module in map(importlib.import_module, modules):
        if hasattr(module, name):
            return getattr(module, name)
    if kind == "download":
        raise ConfigError(
            f"lhotse does not download {recipe}: get the corpus from its publisher, and leave --download out",
            code="bad_usage",
        )
    raise ConfigError(f"lhotse's recipe {recipe} has no function {name}", code="unknown_name")


def _further_parameters(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """Return the parameters of a recipe's function behind the folder."""
    return dict(itertools.islice(inspect.signature(function).parameters.items(), 1, None))


def _download(corpus: Corpus, download: Callable[..., Any], directory: Path, options: dict[str, Any]) -> Path:
    """Download a corpus, or what an earlier call has left of it, and return its folder.

    lhotse continues an archive that is there, and marks what is unpacked as ``.completed``.

    Raises:
        FatalError: the network or the disk fails, or an archive is damaged.
    """
    socket.setdefaulttimeout(_NETWORK_TIMEOUT)
    try:
        with stopping_errors(directory):
            return Path(download(directory, **options)) / corpus.folder
    except (OSError, EOFError, HTTPException, TarError, BadZipFile, zlib.error) as error:
        raise FatalError(
            f"{corpus.recipe} is not downloaded to {directory}: {one_line(error)}; run the same command again, which "
            "goes on from here, and if an archive is damaged, remove it before",
            code="missing_input",
        ) from error


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
