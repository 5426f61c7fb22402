"""The bad records of the demo corpus: one of each kind that real corpora have, for the demo's rejects.

Every kind is a function that takes good speech, writes what it needs and returns one manifest record, which
says in ``demo_defect`` what is wrong with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

import numpy as np

from sharmill.demo.records import Record, SpokenText, write_audio

# The reason code that a prepared manifest should give for each kind (see ``sharmill.errors.REASONS``).
DEFECTS: Final[dict[str, str]] = {
    "missing_file": "missing_audio",
    "not_audio": "unreadable_audio",
    "truncated_flac": "unreadable_audio",
    "stereo": "unsupported_channels",
    "wrong_duration": "duration_mismatch",
    "empty_text": "empty_text",
    "bad_speaker_tag": "bad_speaker",
    "skipme": "skipped",
    "not_json": "malformed",
    "outside_root": "outside_root",
    "duplicate": "duplicate_id",
    "single_utterance": "single_utterance_speaker",
    "nan_samples": "non_finite_audio",
    "too_short": "too_short",
}

_NOT_JSON: Final = '{"audio_filepath": "ada/ada_9999.flac", "duration": 3.2, "text": "this line was cut o'
_TRUNCATED_FRACTION: Final = 0.4
_NAN_SAMPLES: Final = slice(1000, 1010)
_SHORT_SECONDS: Final = 0.05


def spoil(utterances: Iterator[SpokenText], solo: SpokenText) -> Iterator[Record | str]:
    """Yield all bad records but the duplicate, which needs a good one; a text is a line that is not JSON."""
    for defect, make in _MAKERS.items():
        yield make(next(utterances)) | {"demo_defect": defect}
    yield solo.write_as("only") | {"demo_defect": "single_utterance"}
    yield _NOT_JSON


def duplicate(record: Record) -> Record:
    """Return a record of the same segment."""
    return record | {"demo_defect": "duplicate"}


def _missing_file(utterance: SpokenText) -> Record:
    return utterance.record(f"{utterance.speaker.name}/no_such_file.flac")


def _not_audio(utterance: SpokenText) -> Record:
    record = utterance.write_as("not_audio", suffix=".wav")
    path = utterance.audio_root / record["audio_filepath"]
    path.write_text("<html><body>404 not found</body></html>\n" * 50)
    return record


def _truncated_flac(utterance: SpokenText) -> Record:
    """Cut a file off behind its header, which gives the full length, so that only decoding shows it."""
    record = utterance.write_as("truncated")
    path = utterance.audio_root / record["audio_filepath"]
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * _TRUNCATED_FRACTION)])
    return record


def _stereo(utterance: SpokenText) -> Record:
    channels = np.stack([utterance.samples, utterance.samples // 2], axis=1)
    return utterance.write_as("stereo", channels, suffix=".wav")


def _wrong_duration(utterance: SpokenText) -> Record:
    record = utterance.write_as("wrong_duration")
    return record | {"duration": round(record["duration"] + 4.0, 6)}


def _empty_text(utterance: SpokenText) -> Record:
    return utterance.write_as("empty_text") | {"text": " "}


def _bad_speaker_tag(utterance: SpokenText) -> Record:
    return utterance.write_as("bad_speaker_tag") | {"speaker": f"{utterance.speaker.name}, English (demo)"}


def _skipme(utterance: SpokenText) -> Record:
    return utterance.write_as("skipme") | {"_skipme": 1}


def _outside_root(utterance: SpokenText) -> Record:
    """Name a file that exists and is sound, but lies outside the audio root."""
    path = "../outside_root.flac"
    write_audio(utterance.audio_root / path, utterance.samples, utterance.speaker.sampling_rate)
    return utterance.record(path)


def _nan_samples(utterance: SpokenText) -> Record:
    samples = utterance.samples.astype(np.float32) / np.float32(32768)
    samples[_NAN_SAMPLES] = np.nan
    return utterance.write_as("nan", samples, suffix=".wav")


def _too_short(utterance: SpokenText) -> Record:
    num_samples = round(_SHORT_SECONDS * utterance.speaker.sampling_rate)
    middle = len(utterance.samples) // 2
    return utterance.write_as("short", utterance.samples[middle : middle + num_samples])


_MAKERS: Final[dict[str, Callable[[SpokenText], Record]]] = {
    "missing_file": _missing_file,
    "not_audio": _not_audio,
    "truncated_flac": _truncated_flac,
    "stereo": _stereo,
    "wrong_duration": _wrong_duration,
    "empty_text": _empty_text,
    "bad_speaker_tag": _bad_speaker_tag,
    "skipme": _skipme,
    "outside_root": _outside_root,
    "nan_samples": _nan_samples,
    "too_short": _too_short,
}
