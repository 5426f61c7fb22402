"""Own recipes, and what single recipes of lhotse need to be told about the folder of their corpus."""

from __future__ import annotations

import os
import re
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from sharmill.audio.files import probe
from sharmill.errors import ConfigError, RejectRecord

# NeMo's name of a part of Fisher, and LDC's names of its audio and of its texts.
_FISHER: Final = (
    ("LDC2004S13-Part1", "LDC2004S13", "LDC2004T19"),
    ("LDC2005S13-Part2", "LDC2005S13", "LDC2005T19"),
)
_AN4_LINE: Final = re.compile(r"(.*)\(([^()\s]+)\)\s*")
_AN4_MARKS: Final = ("<s>", "</s>", "<sil>")


def forgive_headers() -> None:
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


def parts_of_libritts(directory: Path) -> dict[str, Any]:
    """Return the parts of LibriTTS that are there: by itself the recipe wants them all."""
    from lhotse.recipes.libritts import LIBRITTS

    found = [name for name in LIBRITTS if (directory / name).is_dir()]
    if not found:
        raise ConfigError(f"{directory} has none of the folders {', '.join(LIBRITTS)}; name the folder that has",
                          code="missing_input")  # fmt: skip
    return {"dataset_parts": found}


def form_of_vctk(directory: Path) -> dict[str, Any]:
    """Return the published form of VCTK that a folder has: version 0.92 is FLAC of two microphones."""
    return {"use_edinburgh_vctk_url": (directory / "wav48_silence_trimmed").is_dir()}


def read_hifitts(directory: Path) -> dict[str, Any]:
    """Return the partitions of HiFi-TTS, each read by itself: lhotse's recipe may give one the name of another."""
    from lhotse.recipes.hifitts import prepare_single_partition

    forgive_headers()
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


def read_fisher(directory: Path) -> dict[str, Any]:
    """Return the recordings and supervisions of the parts of Fisher that are there.

    Either as LDC names them, LDC2004S13 with LDC2004T19 and LDC2005S13 with LDC2005T19, or in the two folders of NeMo's
    documentation, LDC2004S13-Part1 and LDC2005S13-Part2, which lhotse's recipe does not know: it gets links.
    """
    from lhotse import RecordingSet, SupervisionSet
    from lhotse.recipes.fisher_english import prepare_fisher_english

    forgive_headers()
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
        supervisions = SupervisionSet.from_segments(list(made["supervisions"]))
        return {"recordings": RecordingSet.from_recordings(recordings), "supervisions": supervisions}


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


def read_an4(directory: Path) -> dict[str, list[dict[str, Any]]]:
    """Return the records of AN4 by split: ``etc/an4_<split>.transcription`` and ``.fileids``, SPHERE below ``wav``."""
    directory = directory if (directory / "etc").is_dir() or not (directory / "an4").is_dir() else directory / "an4"
    splits = {}
    for split in ("train", "test"):
        lists = [directory / "etc" / f"an4_{split}.{kind}" for kind in ("fileids", "transcription")]
        if any(path.exists() for path in lists):
            files, lines = ([line.strip() for line in path.read_text("utf-8").splitlines()] for path in lists)
            texts = dict(_an4_text(line) for line in filter(None, lines))
            splits[split] = [_an4_record(directory, lists[0], file, texts) for file in filter(None, files)]
    if not splits:
        raise ValueError(f"there is no {directory / 'etc' / 'an4_train.fileids'}")
    return splits


def _an4_text(line: str) -> tuple[str, str]:
    """Return the name and the text of a line of a transcription.

    >>> _an4_text("<s> R U B O U T </s> (an251-fash-b)")
    ('an251-fash-b', 'R U B O U T')
    """
    match = _AN4_LINE.fullmatch(line)
    if match is None:
        raise ValueError(f"the line {line[:80]!r} of a transcription does not end in (NAME)")
    return match[2], " ".join(word for word in match[1].split() if word not in _AN4_MARKS)


def _an4_record(directory: Path, source: Path, file: str, texts: dict[str, str]) -> dict[str, Any]:
    name = file.rpartition("/")[2]
    if name not in texts:
        raise ValueError(f"{source.name} names {file}, of which {source.stem}.transcription has no text")
    speaker = name.partition("-")[2].partition("-")[0]
    record = {
        "utterance_id": name,
        "audio_filepath": str(directory / "wav" / f"{file.removesuffix('.sph')}.sph"),
        "text": texts[name],
        "speaker": speaker or name,
        "language": "en",
    }
    gender = {"f": "female", "m": "male"}.get(speaker[:1])
    return record | ({"gender": gender} if gender else {})
