"""Demo corpus: speech of a dozen synthetic speakers, with a NeMo manifest and some bad records.

``sharmill demo`` and the end-to-end tests use this corpus. It has the features of real corpora: FLAC and WAV, whole
files and segments of long files, optional keys, and one bad record of each kind. Its sentences are generated from
``sentences.txt``.
"""

import functools
import itertools
import json
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Any, Final

import numpy as np
import soundfile
from numpy.typing import NDArray

from sharmill.demo.espeak import Espeak, VoiceSettings
from sharmill.errors import ConfigError, refuse
from sharmill.files.atomic import make_folder, open_folder_atomic

# Increase the version whenever the files of the corpus change, so that an old corpus is not reused.
_VERSION: Final = 2
_MANIFEST: Final = "manifest.json"
_AUDIO_ROOT: Final = "audio"
_MARKER: Final = "corpus.json"

_UTTERANCES_PER_SESSION: Final = 5
_PAUSE_SECONDS: Final = 0.4

Record = dict[str, Any]
Samples = NDArray[Any]

# Limits on the duration of an utterance in seconds; sentences outside the limits are replaced.
_MIN_DURATION: Final = 1.0
_MAX_DURATION: Final = 12.0

_LEVEL: Final = 0.08  # root mean square of the speech, relative to full scale
_NOT_JSON: Final = '{"audio_filepath": "ada/ada_9999.flac", "duration": 3.2, "text": "this line was cut o'
_SHORT_SAMPLES: Final = round(0.05 * Espeak.sampling_rate)
# Half of the sentences are long, since a context for a zero-shot model should last at least three seconds.
_LENGTHS: Final = ("long", "medium", "longest", "medium", "long", "short", "long", "medium")
_MAX_WORDS: Final = 30
_SLOT: Final = re.compile(r"\{(\w+)\}")

# Voice, rate, pitch and pitch range of each speaker. Of all selections of twelve espeak variants, the speaker encoder
# resemblyzer separates this one best: its most similar pair has the lowest similarity.
VOICES: Final[dict[str, VoiceSettings]] = {
    "ada": VoiceSettings("en-us+f5", 170, 54, 55),
    "ben": VoiceSettings("en+david", 175, 45, 50),
    "cora": VoiceSettings("en+Alicia", 165, 52, 60),
    "dan": VoiceSettings("en-us+Gene", 180, 48, 45),
    "ella": VoiceSettings("en-gb-scotland+anika", 175, 55, 60),
    "finn": VoiceSettings("en-gb-scotland+Hugo", 165, 50, 40),
    "gwen": VoiceSettings("en-029+aunty", 160, 50, 50),
    "hugh": VoiceSettings("en-029+Lee", 170, 46, 50),
    "iris": VoiceSettings("en-us+steph2", 180, 52, 55),
    "jack": VoiceSettings("en+pablo", 170, 50, 45),
    "kate": VoiceSettings("en-029+kaukovalta", 165, 50, 55),
    "liam": VoiceSettings("en-us+sandro", 175, 50, 50),
}
# Voice of an additional speaker with a single utterance, which therefore has no context.
_SOLO_VOICE: Final = VoiceSettings("en-gb-scotland+m3", 170, 50, 50)


class Speaker:
    """Synthetic speaker, whose speaking rate varies slightly between utterances."""

    def __init__(self, name: str, voice: VoiceSettings, espeak: Espeak, *, seed: int) -> None:
        self.name = name
        self._voice = voice
        self.sampling_rate = espeak.sampling_rate
        self._espeak = espeak
        self._rng = np.random.default_rng([seed, *name.encode()])

    def say(self, text: str) -> NDArray[np.int16] | None:
        """Return speech for ``text``, shape (time,); None if its duration is outside the limits.

        The speaking rate is drawn for each utterance, within 5 % of the rate of the voice.
        """
        rate = round(self._voice.rate * self._rng.uniform(0.95, 1.05))
        speech = self._espeak.synthesize(text, replace(self._voice, rate=rate))
        if not _MIN_DURATION <= len(speech) / self.sampling_rate <= _MAX_DURATION:
            return None
        samples = speech.astype(np.float64)
        samples *= _LEVEL / np.sqrt(np.mean(samples**2))
        return np.round(np.clip(samples, -1.0, 1.0) * 32767).astype(np.int16)


def make_speakers(espeak: Espeak, *, num_voices: int, seed: int) -> list[Speaker]:
    """Return the first ``num_voices`` speakers."""
    return [Speaker(name, voice, espeak, seed=seed) for name, voice in itertools.islice(VOICES.items(), num_voices)]


@dataclass(frozen=True)
class SpokenText:
    """Synthesized speech with its text and speaker, before it is written to disk."""

    audio_root: Path
    speaker: Speaker
    text: str
    samples: Samples

    def record(self, path: str) -> Record:
        """Return a manifest record with ``path``, which is relative to the audio root."""
        return {
            "audio_filepath": path,
            "duration": round(len(self.samples) / self.speaker.sampling_rate, 6),
            "text": self.text,
            "speaker": f"| Language:en Dataset:Demo Speaker:{self.speaker.name} |",
        }

    def write(self, path: str) -> Record:
        """Write the samples to a path relative to the audio root, and return their manifest record."""
        _write_audio(self.audio_root / path, self.samples, self.speaker.sampling_rate)
        return self.record(path)


def _write_audio(path: Path, samples: Samples, sampling_rate: int) -> None:
    """Write samples, shape (time,) or (time, channels), in the format given by the suffix of ``path``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    subtype = "FLOAT" if samples.dtype == np.float32 else "PCM_16"
    soundfile.write(path, samples, sampling_rate, subtype=subtype)
    if subtype == "FLOAT":
        content = bytearray(path.read_bytes())
        # libsndfile writes the current time into this chunk, which must be cleared to keep the corpus reproducible. The
        # chunk consists of name, size, version and time, four bytes each.
        if (chunk := content.find(b"PEAK")) >= 0:
            content[chunk + 12 : chunk + 16] = bytes(4)
            path.write_bytes(content)


@dataclass(frozen=True)
class _Defect:
    """Kind of bad record, derived from good speech.

    Args:
        path: path of the file, relative to the audio root; ``{0}`` is replaced by the speaker.
        samples: function that changes the samples before they are written; None if no file is written.
        content: function that changes the bytes of the file.
        keys: function that returns the keys in which the record differs from a good record, with their values.
    """

    path: str
    samples: Callable[[Samples], Samples] | None = lambda good: good
    content: Callable[[bytes], bytes] = lambda file: file
    keys: Callable[[SpokenText], dict[str, Any]] = lambda said: {}

    def make(self, said: SpokenText) -> Record:
        """Write the file if there is one, and return the record."""
        path = self.path.format(said.speaker.name)
        if self.samples is None:
            return said.record(path) | self.keys(said)
        record = replace(said, samples=self.samples(said.samples)).write(path)
        file = said.audio_root / path
        file.write_bytes(self.content(file.read_bytes()))
        return record | self.keys(said)


def _with_nan(good: Samples) -> Samples:
    samples = good.astype(np.float32) / np.float32(32768)
    samples[1000:1010] = np.nan
    return samples


_MADE: Final[dict[str, _Defect]] = {
    "missing_file": _Defect("{0}/no_such_file.flac", samples=None),
    "not_audio": _Defect("{0}/{0}_not_audio.wav",
                        content=lambda file: b"<html><body>404 not found</body></html>\n" * 50),
    # The header gives the full length, so that only decoding reveals the truncation.
    "truncated_flac": _Defect("{0}/{0}_truncated.flac",
                             content=lambda file: file[: int(len(file) * 0.4)]),
    "stereo": _Defect("{0}/{0}_stereo.wav",
                     samples=lambda good: np.stack([good, good // 2], axis=1)),
    "wrong_duration": _Defect("{0}/{0}_wrong_duration.flac",
                             keys=lambda said: {"duration": round(said.record("")["duration"] + 4.0, 6)}),
    "empty_text": _Defect("{0}/{0}_empty_text.flac", keys=lambda said: {"text": " "}),
    "bad_speaker_tag": _Defect("{0}/{0}_bad_speaker_tag.flac",
                              keys=lambda said: {"speaker": f"| Speaker:{said.speaker.name} |"}),
    "skipme": _Defect("{0}/{0}_skipme.flac", keys=lambda said: {"_skipme": 1}),
    # The file is valid audio, but outside the audio root.
    "outside_root": _Defect("../outside_root.flac"),
    "nan_samples": _Defect("{0}/{0}_nan.wav", samples=_with_nan),
    "too_short": _Defect("{0}/{0}_short.flac",
                        samples=lambda good: good[len(good) // 2 :][:_SHORT_SAMPLES]),
}  # fmt: skip
_SINGLE: Final = _Defect("{0}/{0}_only.flac")


@dataclass(frozen=True)
class CorpusSummary:
    """Location and size of a demo corpus.

    Args:
        manifest: the manifest, as JSON lines.
        audio_root: the folder to which the paths of the manifest are relative.
        num_records: number of lines in the manifest, including bad records.
        num_bad_records: number of lines that a pipeline must reject.
        audio_seconds: total duration of the good records in seconds.
    """

    manifest: Path
    audio_root: Path
    num_records: int
    num_bad_records: int
    audio_seconds: float


def make_corpus(
    directory: Path, *, num_voices: int = 12, utterances_per_voice: int = 20, seed: int = 42
) -> CorpusSummary:
    """Create the corpus in ``directory``, unless it already contains a corpus made with the same arguments.

    Equal arguments give identical files. The directory appears only when the corpus is complete.

    Raises:
        ConfigError: an argument is out of range, espeak-ng is missing, or ``directory`` contains other files.
    """
    arguments = {
        "version": _VERSION,
        "num_voices": num_voices,
        "utterances_per_voice": utterances_per_voice,
        "seed": seed,
    }
    refuse(
        (
            not 1 <= num_voices <= len(VOICES),
            f"num_voices is {num_voices}; use 1 to {len(VOICES)}",
        ),
        (utterances_per_voice < 2, f"utterances_per_voice is {utterances_per_voice}; use at least 2, for contexts"),
    )
    marker = directory / _MARKER
    if not directory.exists() or (directory.is_dir() and not any(directory.iterdir())):
        make_folder(directory.absolute().parent)
        with open_folder_atomic(directory.absolute()) as temp_dir:
            totals = _build(temp_dir, num_voices=num_voices, utterances_per_voice=utterances_per_voice, seed=seed)
            (temp_dir / _MARKER).write_text(json.dumps({"arguments": arguments, "totals": totals}, indent=2) + "\n")
    try:
        content = json.loads(marker.read_bytes())
        made, totals = content["arguments"], content["totals"]
        summary = CorpusSummary(directory / _MANIFEST, directory / _AUDIO_ROOT, **totals)
    except (OSError, ValueError, LookupError, TypeError):
        raise ConfigError(
            f"{directory} is not empty and does not contain an intact demo corpus: delete it or choose another "
            "directory",
            code="foreign_output",
        ) from None
    if made != arguments:
        raise ConfigError(
            f"{directory} contains a demo corpus made with {made}, not {arguments}: delete it or choose another "
            "directory",
            code="foreign_output",
        )
    return summary


def _build(directory: Path, *, num_voices: int, utterances_per_voice: int, seed: int) -> dict[str, Any]:
    """Write all files except the marker, and return the totals of the summary."""
    espeak = Espeak()
    speakers = make_speakers(espeak, num_voices=num_voices, seed=seed)
    texts = sentences(seed=seed)
    rng = random.Random(seed)

    def speak(speaker: Speaker) -> SpokenText:
        """Return the speaker's speech for the next sentence; skip sentences whose speech is too short or too long."""
        while (samples := speaker.say(text := next(texts))) is None:
            pass
        return SpokenText(directory / _AUDIO_ROOT, speaker, text, samples)

    good: list[Record] = []
    for index, speaker in enumerate(speakers):
        own, suffix = [speak(speaker) for _ in range(utterances_per_voice)], ".wav" if index % 3 == 2 else ".flac"
        # Every sixth speaker has files with whole sessions; all other speakers have one file per utterance.
        if index % 6 == 1:
            good += _write_sessions(own, suffix=suffix)
        else:
            name = speaker.name
            good += [said.write(f"{name}/{name}_{number:04d}{suffix}") for number, said in enumerate(own)]
    good = [_add_optional_keys(record, index, rng) for index, record in enumerate(good)]

    # There is one bad record of each kind. ``demo_defect`` names its kind, except for _NOT_JSON, which is not JSON.
    solo = speak(Speaker("solo", _SOLO_VOICE, espeak, seed=seed))
    bad: list[Record | str] = [
        defect.make(speak(speaker)) | {"demo_defect": name}
        for (name, defect), speaker in zip(_MADE.items(), itertools.cycle(speakers), strict=False)
    ]
    bad += [_SINGLE.make(solo) | {"demo_defect": "single_utterance"}, _NOT_JSON, good[0] | {"demo_defect": "duplicate"}]
    _write_manifest(directory / _MANIFEST, good, bad, rng)
    return {
        "num_records": len(good) + len(bad),
        "num_bad_records": len(bad),
        "audio_seconds": round(sum(record["duration"] for record in good), 3),
    }


def _write_sessions(utterances: list[SpokenText], *, suffix: str) -> list[Record]:
    """Write utterances to long files with pauses in between, and return records of their segments."""
    records = []
    for first in range(0, len(utterances), _UTTERANCES_PER_SESSION):
        session = utterances[first : first + _UTTERANCES_PER_SESSION]
        speaker = session[0].speaker
        path = f"{speaker.name}/{speaker.name}_session_{first // _UTTERANCES_PER_SESSION:02d}{suffix}"
        pause = np.zeros(round(_PAUSE_SECONDS * speaker.sampling_rate), np.int16)
        pieces = [pause]
        for utterance in session:
            offset = sum(map(len, pieces)) / speaker.sampling_rate
            records.append(utterance.record(path) | {"offset": round(offset, 6)})
            pieces += [utterance.samples, pause]
        _write_audio(utterances[0].audio_root / path, np.concatenate(pieces), speaker.sampling_rate)
    return records


def _add_optional_keys(record: Record, index: int, rng: random.Random) -> Record:
    """Return a record with optional keys, which only some records of real corpora have."""
    if index % 10 != 9:
        record = record | {"cer": round(rng.uniform(0.0, 0.025), 4)}
    if index % 3 == 0:
        record = record | {"normalized_text": re.sub(r"[^\w' ]", "", record["text"]).lower()}
    return record


def _write_manifest(path: Path, good: list[Record], bad: list[Record | str], rng: random.Random) -> None:
    """Write good records and randomly placed bad records; a bad record may be a line of text that is not JSON."""
    lines = [json.dumps(record) for record in good]
    for record in bad:
        # The first line is excluded, so that the duplicate of the first record comes after the original.
        lines.insert(rng.randrange(1, len(lines) + 1), record if isinstance(record, str) else json.dumps(record))
    path.write_text("\n".join(lines) + "\n")


def sentences(*, seed: int) -> Iterator[str]:
    """Yield an endless stream of distinct sentences of 3 to 30 words; equal seeds give equal sentences.

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
    """Return the alternatives of each grammar rule, in the order of the file."""
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
    # A phrase is not repeated within a sentence, to avoid "Rosa and Rosa waited".
    while slot := _SLOT.search(template):
        text = rng.choice([text for text in _rules()[slot[1]] if text not in used])
        used.add(text)
        template = template[: slot.start()] + text + template[slot.end() :]
    return template
