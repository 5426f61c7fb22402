"""Recipes for corpora that lhotse does not read (AN4) or does not read well enough (HiFi-TTS, Fisher, HUB5).

Audio headers are read with sharmill's reader, so a single unreadable file does not stop a recipe.
"""

import logging
import os
import re
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from sharmill.audio.files import probe
from sharmill.errors import RejectRecord
from sharmill.sources.files import split_lines

# NeMo's name for each part of Fisher, and LDC's names for its audio and its texts.
_FISHER: Final = (
    ("LDC2004S13-Part1", "LDC2004S13", "LDC2004T19"),
    ("LDC2005S13-Part2", "LDC2005S13", "LDC2005T19"),
)
# Text that marks an utterance to be left out. Utterances before and after it are not joined with each other.
LEFT_OUT: Final = "(("
# The split to which each tenth of Fisher's recordings belongs.
_FISHER_SPLITS: Final = (*["train"] * 8, "validation", "test")
# Parts of Fisher's texts that are removed: tags, such as [laughter] or the second transcriber's <noise>, and
# punctuation.
_FISHER_TAG: Final = re.compile(r"\[+[^\]]*\]+|<[^>]*>")
_FISHER_SIGNS: Final = str.maketrans(dict.fromkeys('()*;:"!&{},.-?'))
# HUB5's file with the texts for scoring. Each line consists of recording, channel, speaker, start, end, labels, and a
# text with markup for asides and hesitations.
_HUB5_TEXTS: Final = "hub5e00.english.000405.stm"
_STM_LINE: Final = re.compile(r"(\S+)\s+([AB])\s+(\S+)\s+([\d.]+)\s+([\d.]+)\s+(?:<[^>]*>)?(.*)")
_STM_HESITATION: Final = re.compile(r"\(%(?:hesitation|uh|ah)\)")
_STM_MARK: Final = re.compile(r"<[be]_aside>|[()-]")
_AN4_LINE: Final = re.compile(r"(.*)\(([^()\s]+)\)\s*")


def forgive_headers() -> None:
    """Make lhotse read headers with sharmill's reader until this process ends.

    If the reader rejects a file, the recipe is told that the file is long and has two channels, so that it keeps all
    segments of the file. These are rejected later, when all records are checked. SPHERE files are read without
    sph2pipe.
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


def read_hifitts(directory: Path) -> dict[str, Any]:
    """Return recordings and supervisions of HiFi-TTS by partition.

    The partitions are read one by one, since lhotse's recipe for the whole corpus may confuse their names.
    """
    from lhotse.recipes.hifitts import prepare_single_partition

    forgive_headers()
    parts = {}
    for path in sorted(directory.glob("*_manifest_*.json")):
        speaker, _, quality, split = path.stem.split("_")
        recordings, supervisions = prepare_single_partition(path, directory, speaker, quality)
        # Include the quality in the speaker's name, as in the partition's name: a speaker has recordings of several
        # qualities.
        for supervision in supervisions:
            supervision.custom["speaker_name"] = supervision.speaker
            supervision.speaker = f"{speaker}_{quality}"
        parts[f"{speaker}_{quality}_{split}"] = {"recordings": recordings, "supervisions": supervisions}
    if not parts:
        raise ValueError("it has no files such as 92_manifest_clean_train.json")
    return parts


def read_fisher(directory: Path, *, remove_noises: bool = False) -> dict[str, Any]:
    """Return recordings and supervisions of the existing parts of Fisher, by split.

    The first 80 % of the recordings, sorted by name, are for training, the next 10 % for validation, and the rest for
    testing. With ``remove_noises``, texts are cleaned as in NeMo's script, and uncertain utterances are left out.

    The parts may have LDC's names (LDC2004S13 with LDC2004T19, LDC2005S13 with LDC2005T19), or the names in NeMo's
    documentation (LDC2004S13-Part1 and LDC2005S13-Part2). lhotse's recipe knows only LDC's names, so it reads the parts
    through links with these names.
    """
    from lhotse.recipes.fisher_english import prepare_fisher_english

    forgive_headers()
    with tempfile.TemporaryDirectory(prefix="sharmill-fisher-") as scratch:
        corpus = Path(scratch) / "corpus"
        found = [names for part, *names in _FISHER if _link_fisher(directory, part, names, corpus)]
        if not found:
            raise ValueError(f"it has none of the folders {', '.join(name for row in _FISHER for name in row[:2])}")
        audio, texts = map(list, zip(*found, strict=True))
        try:
            made = prepare_fisher_english(corpus, Path(scratch) / "out", audio, texts, absolute_paths=True)
        except (AssertionError, OSError, ValueError) as error:
            text = str(error)
            for link in (*corpus.glob("*/*"), *corpus.iterdir()):
                text = text.replace(f"{link}", os.path.realpath(link))
            raise ValueError(text.replace(str(corpus), str(directory))) from error
        recordings = list(made["recordings"])
        for part in (part for recording in recordings for part in recording.sources):
            part.source = os.path.realpath(part.source)
        utterances = list(made["supervisions"])
    if remove_noises:
        for utterance in utterances:
            utterance.text = _clean_fisher(utterance.text)
        num_left = sum(utterance.text in ("", LEFT_OUT) for utterance in utterances)
        logging.warning(
            "%d utterances are left out, because they contain only noises or uncertain text in (( ))", num_left
        )
        utterances = [utterance for utterance in utterances if utterance.text]
    names = sorted(recording.id for recording in recordings)
    splits = {name: _FISHER_SPLITS[10 * number // len(names)] for number, name in enumerate(names)}
    return {
        split: {
            "recordings": [part for part in recordings if splits[part.id] == split],
            "supervisions": [part for part in utterances if splits[part.recording_id] == split],
        }
        for split in dict.fromkeys(splits.values())
    }


def _clean_fisher(text: str) -> str:
    """Return a text in lower case without tags and punctuation, or ``LEFT_OUT`` if it is uncertain.

    >>> _clean_fisher("[laughter] I have a 'Mini-van' [uh] on A._B._C.")
    'i have a minivan uh on a b c'
    """
    if "((" in text:
        return LEFT_OUT
    text = text.lower().replace("[uh]", "uh").replace("[um]", "um")
    text = _FISHER_TAG.sub(" ", text).replace("._", " ").translate(_FISHER_SIGNS)
    return " ".join(re.sub(r"'([a-z]+)'", r"\1", text).split())


def read_hub5(directory: Path, transcript_path: str | None = None) -> dict[str, Any]:
    """Return recordings and supervisions of HUB5, with the clean texts of its STM file if there is one.

    Without this file, the texts come from lhotse's recipe. The folders have the names that LDC uses (LDC2002S09,
    LDC2002T43) or those in NeMo's script (hub5e_00, 2000_hub5_eng_eval_tr).
    """
    from lhotse import Recording, RecordingSet, SupervisionSegment, SupervisionSet, fix_manifests
    from lhotse.recipes.eval2000 import prepare_eval2000

    forgive_headers()
    texts = next(iter(sorted(directory.rglob(_HUB5_TEXTS))), None)
    if texts is None or transcript_path is not None:
        with tempfile.TemporaryDirectory(prefix="sharmill-hub5-") as scratch:
            return prepare_eval2000(directory, scratch, transcript_path, absolute_paths=True)
    files = sorted(directory.rglob("hub5e_00/english/*.sph"))
    if not files:
        raise ValueError("it has no .sph files in hub5e_00/english")
    utterances = []
    for number, line in enumerate(split_lines(texts.read_text("utf-8")), start=1):
        if line.startswith(";;") or "inter_segment_gap" in line.lower() or not line.strip():
            continue
        match = _STM_LINE.fullmatch(line.strip())
        if match is None:
            raise ValueError(f"line {number} of {texts} is not a valid STM utterance: {line[:80]!r}")
        recording, channel, speaker, start, end, text = match.groups()
        text = _STM_MARK.sub("", _STM_HESITATION.sub("uh", text.lower()))
        text = LEFT_OUT if "ignore_time_segment_" in text else " ".join(text.split())
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


def _link_fisher(directory: Path, part: str, names: list[str], corpus: Path) -> bool:
    """Link a part of Fisher into ``corpus`` under LDC's names; return False if the part does not exist."""
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
    """Return the records of AN4 by split.

    A split consists of ``etc/an4_<split>.fileids``, ``etc/an4_<split>.transcription``, and SPHERE files below ``wav``.
    """
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
        raise ValueError(f"{directory / 'etc' / 'an4_train.fileids'} does not exist")
    return splits


def _an4_record(directory: Path, file: str, line: str) -> dict[str, Any]:
    """Return the record for a file and its transcription line, such as ``<s> R U B OUT </s> (an251-fash-b)``."""
    path = file.removesuffix(".sph")
    name, match = path.rpartition("/")[2], _AN4_LINE.fullmatch(line)
    if match is None or match[2] != name:
        raise ValueError(f"the transcription line {line[:80]!r} does not end in ({name}) to match the fileids")
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
