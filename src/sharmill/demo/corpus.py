"""The demo corpus: speech of a dozen synthetic speakers with a NeMo manifest and some bad records.

It is what ``sharmill demo`` and the end-to-end tests run on, and shows what real corpora have: FLAC and WAV,
whole files and segments of long ones, optional keys. Voices are in ``voices``, texts in ``sentences.txt``, bad
records in ``defects``.
"""

from __future__ import annotations

import functools
import itertools
import json
import random
import re
import shutil
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, Final

import numpy as np

from sharmill.demo.defects import bad_records
from sharmill.demo.espeak import Espeak
from sharmill.demo.voices import SOLO_VOICE, Record, Speaker, SpokenText, make_speakers, write_audio
from sharmill.errors import ConfigError

# Raised whenever the same arguments would give other files, so that an old corpus is not taken for a new one.
_VERSION: Final = 2
_MANIFEST: Final = "manifest.json"
_AUDIO_ROOT: Final = "audio"
_MARKER: Final = "corpus.json"

_UTTERANCES_PER_SESSION: Final = 5
_PAUSE_SECONDS: Final = 0.4


@dataclass(frozen=True)
class CorpusSummary:
    """The corpus that ``make_corpus`` made.

    Args:
        manifest: the manifest, JSON lines.
        audio_root: what the paths of the manifest are relative to.
        num_records: lines of the manifest, the bad ones included.
        num_bad_records: lines that no pipeline should let through.
        audio_seconds: total duration of the good records.
    """

    manifest: Path
    audio_root: Path
    num_records: int
    num_bad_records: int
    audio_seconds: float


def make_corpus(
    directory: Path, *, num_voices: int = 12, utterances_per_voice: int = 20, seed: int = 42
) -> CorpusSummary:
    """Make the corpus in ``directory``, or find there the one made with the same arguments before.

    The files are the same, byte for byte, for the same arguments; the directory appears only when complete.

    Raises:
        ConfigError: an argument is out of range, espeak-ng is missing, or ``directory`` holds something else.
    """
    arguments = {
        "version": _VERSION,
        "num_voices": num_voices,
        "utterances_per_voice": utterances_per_voice,
        "seed": seed,
    }
    if utterances_per_voice < 2:
        raise ConfigError(
            f"utterances_per_voice is {utterances_per_voice}; a context needs 2 or more", code="bad_config_value"
        )
    if (finished := _find_finished(directory, arguments)) is not None:
        return finished
    directory.parent.mkdir(parents=True, exist_ok=True)
    building = directory.parent / f".{directory.name}.{uuid.uuid4().hex}.tmp"
    try:
        totals = _build(building, num_voices=num_voices, utterances_per_voice=utterances_per_voice, seed=seed)
        marker = json.dumps({"arguments": arguments, "totals": totals}, indent=2)
        (building / _MARKER).write_text(marker + "\n")
        try:
            building.rename(directory)
        except OSError:
            # Another process was faster; what it left is looked at below.
            if not (directory / _MARKER).exists():
                raise
    finally:
        shutil.rmtree(building, ignore_errors=True)
    finished = _find_finished(directory, arguments)
    assert finished is not None, f"{directory} was published without its marker"
    return finished


def _find_finished(directory: Path, arguments: dict[str, int]) -> CorpusSummary | None:
    """Return the corpus in ``directory`` if it was made with these arguments; None if nothing is there."""
    if not directory.exists() or (directory.is_dir() and not any(directory.iterdir())):
        return None
    marker = directory / _MARKER
    if not marker.is_file():
        raise ConfigError(
            f"{directory} is not empty and holds no demo corpus; choose another directory", code="foreign_output"
        )
    content = json.loads(marker.read_text())
    if content["arguments"] != arguments:
        raise ConfigError(
            f"{directory} holds a demo corpus made with {content['arguments']}, not {arguments}; "
            "remove it or choose another directory",
            code="foreign_output",
        )
    return CorpusSummary(directory / _MANIFEST, directory / _AUDIO_ROOT, **content["totals"])


def _build(directory: Path, *, num_voices: int, utterances_per_voice: int, seed: int) -> dict[str, Any]:
    """Write everything but the marker; return the totals of the summary."""
    espeak = Espeak()
    speakers = make_speakers(espeak, num_voices=num_voices, seed=seed)
    texts = sentences(seed=seed)
    rng = random.Random(seed)

    def speak(speaker: Speaker) -> SpokenText:
        """Have a speaker say the next sentence that has the right length in this voice."""
        while (samples := speaker.say(text := next(texts))) is None:
            pass
        return SpokenText(directory / _AUDIO_ROOT, speaker, text, samples)

    good: list[Record] = []
    for index, speaker in enumerate(speakers):
        # Every sixth speaker was recorded in sessions, the others utterance by utterance.
        write = _write_sessions if index % 6 == 1 else _write_utterances
        own = [speak(speaker) for _ in range(utterances_per_voice)]
        good.extend(write(own, suffix=".wav" if index % 3 == 2 else ".flac"))
    good = [_add_optional_keys(record, index, rng) for index, record in enumerate(good)]

    utterances = (speak(speaker) for speaker in itertools.cycle(speakers))
    solo = Speaker("solo", SOLO_VOICE, espeak, seed=seed)
    bad = list(bad_records(utterances, speak(solo), good[0]))
    _write_manifest(directory / _MANIFEST, good, bad, rng)
    return {
        "num_records": len(good) + len(bad),
        "num_bad_records": len(bad),
        "audio_seconds": round(sum(record["duration"] for record in good), 3),
    }


def _write_utterances(utterances: list[SpokenText], *, suffix: str) -> list[Record]:
    name = utterances[0].speaker.name
    return [said.write(f"{name}/{name}_{index:04d}{suffix}") for index, said in enumerate(utterances)]


def _write_sessions(utterances: list[SpokenText], *, suffix: str) -> list[Record]:
    """Write several utterances into one long file, with pauses; return records that cut them out again."""
    records = []
    for first in range(0, len(utterances), _UTTERANCES_PER_SESSION):
        session = utterances[first : first + _UTTERANCES_PER_SESSION]
        speaker = session[0].speaker
        path = f"{speaker.name}/{speaker.name}_session_{first // _UTTERANCES_PER_SESSION:02d}{suffix}"
        pieces = [speaker.silence(_PAUSE_SECONDS)]
        for utterance in session:
            offset = sum(map(len, pieces)) / speaker.sampling_rate
            records.append(utterance.record(path) | {"offset": round(offset, 6)})
            pieces += [utterance.samples, speaker.silence(_PAUSE_SECONDS)]
        write_audio(utterances[0].audio_root / path, np.concatenate(pieces), speaker.sampling_rate)
    return records


def _add_optional_keys(record: Record, index: int, rng: random.Random) -> Record:
    """Return a record with keys that real corpora have on some of their records."""
    if index % 10 != 9:
        record = record | {"cer": round(rng.uniform(0.0, 0.025), 4)}
    if index % 3 == 0:
        record = record | {"normalized_text": re.sub(r"[^\w' ]", "", record["text"]).lower()}
    return record


def _write_manifest(path: Path, good: list[Record], bad: list[Record | str], rng: random.Random) -> None:
    """Write the bad records scattered among the good; one that is a text is a line as it stands."""
    lines = [json.dumps(record) for record in good]
    for record in bad:
        line = record if isinstance(record, str) else json.dumps(record)
        # Never the first line, so that the duplicate of the first record comes after it.
        lines.insert(rng.randrange(1, len(lines) + 1), line)
    path.write_text("\n".join(lines) + "\n")


# Half of the sentences are long: a context for a zero-shot model should last three seconds or more.
_LENGTHS: Final = ("long", "medium", "longest", "medium", "long", "short", "long", "medium")
_MAX_WORDS: Final = 30
_SLOT: Final = re.compile(r"\{(\w+)\}")


def sentences(*, seed: int) -> Iterator[str]:
    """Yield distinct sentences of 3 to 30 words without end, the same for the same seed.

    >>> first = list(itertools.islice(sentences(seed=1), 100))
    >>> len(set(first)), first[0].endswith(".")
    (100, True)
    """
    rng = random.Random(seed)
    seen: set[str] = set()
    for length in itertools.cycle(_LENGTHS):
        sentence = _expand(f"{{{length}}}", rng)
        while sentence in seen or len(sentence.split()) > _MAX_WORDS:
            sentence = _expand(f"{{{length}}}", rng)
        seen.add(sentence)
        yield sentence[0].upper() + sentence[1:]


@functools.cache
def _rules() -> dict[str, list[str]]:
    """Return the alternatives of each rule, in the order of the file."""
    rules: dict[str, list[str]] = {}
    alternatives: list[str] = []
    for line in (files("sharmill.demo") / "sentences.txt").read_text(encoding="utf-8").splitlines():
        if line.startswith("["):
            alternatives = rules.setdefault(line.strip("[]"), [])
        elif line and not line.startswith("#"):
            alternatives.append(line)
    return rules


def _expand(template: str, rng: random.Random) -> str:
    used: set[str] = set()
    # No phrase twice in one sentence: "Rosa and Rosa waited" is not what people say.
    while slot := _SLOT.search(template):
        alternatives = [text for text in _rules()[slot[1]] if text not in used]
        text = rng.choice(alternatives)
        used.add(text)
        template = template[: slot.start()] + text + template[slot.end() :]
    return template
