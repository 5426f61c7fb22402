"""Own recipes, and what single recipes of lhotse need to be told about the folder of their corpus."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from sharmill.audio.files import probe
from sharmill.errors import ConfigError, RejectRecord

# NeMo's name of a part of Fisher, and LDC's of its audio and of its texts.
_FISHER: Final = (
    ("LDC2004S13-Part1", "LDC2004S13", "LDC2004T19"),
    ("LDC2005S13-Part2", "LDC2005S13", "LDC2005T19"),
)
_AN4_LINE: Final = re.compile(r"(.*)\(([^()\s]+)\)\s*")
_AN4_MARKS: Final = ("<s>", "</s>", "<sil>")


@contextmanager
def forgiving_headers() -> Iterator[None]:
    """Have lhotse read headers with sharmill's reader; a file that this refuses counts as a long one of two channels.

    So a recipe gets past it, with all of its segments, and they are rejected where all records are checked. SPHERE
    needs no sph2pipe.
    """
    from lhotse.audio import backend

    class Headers(backend.AudioBackend):
        def info(self, path_or_fd: Any, **_: Any) -> backend.LibsndfileCompatibleAudioInfo:
            try:
                info = probe(path_or_fd)
            except RejectRecord:
                return _header(2, 10**6 * 16000, 16000)
            return _header(info.channels, info.num_samples, info.sampling_rate)

        def is_applicable(self, path_or_fd: Any) -> bool:
            return True

        def handles_special_case(self, path_or_fd: Any) -> bool:
            return True

    def _header(channels: int, num_samples: int, rate: int) -> backend.LibsndfileCompatibleAudioInfo:
        return backend.LibsndfileCompatibleAudioInfo(channels, num_samples, rate, num_samples / rate)

    before = backend.get_current_audio_backend()
    backend.set_current_audio_backend(Headers())
    try:
        yield
    finally:
        backend.set_current_audio_backend(before)


def parts_of_libritts(directory: Path) -> dict[str, Any]:
    """Return the parts of LibriTTS that are there: by itself the recipe wants them all."""
    from lhotse.recipes.libritts import LIBRITTS

    return {"dataset_parts": _existing(directory, LIBRITTS)}


def _existing(directory: Path, names: Any) -> list[str]:
    found = [name for name in names if (directory / name).is_dir()]
    if not found:
        raise ConfigError(f"{directory} has none of the folders {', '.join(names)}; name the folder that has",
                          code="missing_input")  # fmt: skip
    return found


def form_of_vctk(directory: Path) -> dict[str, Any]:
    """Return the published form of VCTK that a folder has: version 0.92 is FLAC of two microphones."""
    return {"use_edinburgh_vctk_url": (directory / "wav48_silence_trimmed").is_dir()}


def read_hifitts(directory: Path) -> dict[str, Any]:
    """Return the partitions of HiFi-TTS, each read by itself: lhotse's recipe may give one the name of another."""
    from lhotse.recipes.hifitts import prepare_single_partition

    parts = {}
    for path in sorted(directory.glob("*_manifest_*.json")):
        speaker, _, quality, split = path.stem.split("_")
        with forgiving_headers():
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

    with tempfile.TemporaryDirectory(prefix="sharmill-fisher-") as scratch, forgiving_headers():
        corpus = Path(scratch) / "corpus"
        found = [names for part, *names in _FISHER if _link_fisher(directory, part, names, corpus)]
        if not found:
            raise ValueError(f"there is none of the folders {', '.join(name for row in _FISHER for name in row[:2])}")
        audio, texts = map(list, zip(*found, strict=True))
        made = prepare_fisher_english(corpus, Path(scratch) / "out", audio, texts, absolute_paths=True)
        recordings = RecordingSet.from_recordings(_without_links(recording) for recording in made["recordings"])
        return {"recordings": recordings, "supervisions": SupervisionSet.from_segments(list(made["supervisions"]))}


def _link_fisher(directory: Path, part: str, names: list[str], corpus: Path) -> bool:
    """Make links to a part of Fisher under the names that LDC gives it; return False where it is not there."""
    audio, texts = names
    corpus.mkdir(exist_ok=True)
    if (directory / audio).is_dir():
        for name in names:
            (corpus / name).symlink_to(directory / name)
        return True
    if not (directory / part).is_dir():
        return False
    (corpus / audio).mkdir()
    for folder in sorted(path for path in (directory / part).iterdir() if path.is_dir()):
        if (folder / "data/trans").is_dir():
            (corpus / texts).symlink_to(folder)
        elif (folder / "audio").is_dir():
            (corpus / audio / folder.name).symlink_to(folder)
    return True


def _without_links(recording: Any) -> Any:
    for source in recording.sources:
        source.source = os.path.realpath(source.source)
    return recording


def read_an4(directory: Path) -> dict[str, list[dict[str, Any]]]:
    """Return the records of AN4 by split: ``etc/an4_<split>.transcription`` and ``.fileids``, SPHERE below ``wav``.

    >>> _an4_text("<s> R U B O U T </s> (an251-fash-b)")
    ('R U B O U T', 'an251-fash-b')
    """
    directory = directory if (directory / "etc").is_dir() or not (directory / "an4").is_dir() else directory / "an4"
    splits = {}
    for split in ("train", "test"):
        lists = [directory / "etc" / f"an4_{split}.{kind}" for kind in ("fileids", "transcription")]
        if any(path.exists() for path in lists):
            files, texts = ([line for line in path.read_text("utf-8").splitlines() if line.strip()] for path in lists)
            splits[split] = _an4_records(directory, lists[0], files, dict(map(_an4_pair, texts)))
    if not splits:
        raise ValueError(f"there is no {directory / 'etc' / 'an4_train.fileids'}")
    return splits


def _an4_records(directory: Path, source: Path, files: list[str], texts: dict[str, str]) -> list[dict[str, Any]]:
    records = []
    for line in map(str.strip, files):
        name = line.rpartition("/")[2]
        if name not in texts:
            raise ValueError(f"{source.name} names {line}, of which {source.stem}.transcription has no text")
        _, _, speaker = name.partition("-")
        speaker = speaker.partition("-")[0]
        audio = directory / "wav" / f"{line.removesuffix('.sph')}.sph"
        record = {
            "utterance_id": name,
            "audio_filepath": str(audio),
            "text": texts[name],
            "speaker": speaker or name,
            "language": "en",
        }
        gender = {"f": "female", "m": "male"}.get(speaker[:1])
        records.append(record | ({"gender": gender} if gender else {}))
    return records


def _an4_pair(line: str) -> tuple[str, str]:
    text, name = _an4_text(line)
    return name, text


def _an4_text(line: str) -> tuple[str, str]:
    match = _AN4_LINE.fullmatch(line)
    if match is None:
        raise ValueError(f"the line {line[:80]!r} of a transcription does not end in (NAME)")
    return " ".join(word for word in match[1].split() if word not in _AN4_MARKS), match[2]
