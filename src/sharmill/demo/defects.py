"""The bad records of the demo corpus: one of each kind that real corpora have, for the demo's rejects."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from sharmill.demo.espeak import Espeak
from sharmill.demo.voices import Record, Samples, SpokenText

_NOT_JSON: Final = '{"audio_filepath": "ada/ada_9999.flac", "duration": 3.2, "text": "this line was cut o'
_SHORT_SAMPLES: Final = round(0.05 * Espeak.sampling_rate)


@dataclass(frozen=True)
class _Defect:
    """A kind of bad record, made of good speech.

    Args:
        reason: the reason code that a prepared manifest should give for it (see ``sharmill.errors.REASONS``).
        path: of its file, relative to the audio root; ``{0}`` is the speaker.
        samples: what is written there of the good samples; None writes no file.
        content: what becomes of the bytes of the file.
        keys: the keys of the record that are not those of good speech.
    """

    reason: str
    path: str
    samples: Callable[[NDArray[np.int16]], Samples] | None = lambda good: good
    content: Callable[[bytes], bytes] = lambda file: file
    keys: Callable[[SpokenText], dict[str, Any]] = lambda said: {}

    def make(self, said: SpokenText) -> Record:
        """Write the file, and return the record."""
        path = self.path.format(said.speaker.name)
        if self.samples is None:
            return said.record(path) | self.keys(said)
        record = said.write(path, self.samples(said.samples))
        file = said.audio_root / path
        file.write_bytes(self.content(file.read_bytes()))
        return record | self.keys(said)


def _with_nan(good: NDArray[np.int16]) -> NDArray[np.float32]:
    samples = good.astype(np.float32) / np.float32(32768)
    samples[1000:1010] = np.nan
    return samples


_MADE: Final[dict[str, _Defect]] = {
    "missing_file": _Defect("missing_audio", "{0}/no_such_file.flac", samples=None),
    "not_audio": _Defect("unreadable_audio", "{0}/{0}_not_audio.wav",
                        content=lambda file: b"<html><body>404 not found</body></html>\n" * 50),
    # Cut off behind its header, which gives the full length, so that only decoding shows it.
    "truncated_flac": _Defect("unreadable_audio", "{0}/{0}_truncated.flac",
                             content=lambda file: file[: int(len(file) * 0.4)]),
    "stereo": _Defect("unsupported_channels", "{0}/{0}_stereo.wav",
                     samples=lambda good: np.stack([good, good // 2], axis=1)),
    "wrong_duration": _Defect("duration_mismatch", "{0}/{0}_wrong_duration.flac",
                             keys=lambda said: {"duration": round(said.duration + 4.0, 6)}),
    "empty_text": _Defect("empty_text", "{0}/{0}_empty_text.flac", keys=lambda said: {"text": " "}),
    "bad_speaker_tag": _Defect("bad_speaker", "{0}/{0}_bad_speaker_tag.flac",
                              keys=lambda said: {"speaker": f"| Speaker:{said.speaker.name} |"}),
    "skipme": _Defect("skipped", "{0}/{0}_skipme.flac", keys=lambda said: {"_skipme": 1}),
    # A sound file, but outside the audio root.
    "outside_root": _Defect("outside_root", "../outside_root.flac"),
    "nan_samples": _Defect("non_finite_audio", "{0}/{0}_nan.wav", samples=_with_nan),
    "too_short": _Defect("too_short", "{0}/{0}_short.flac",
                        samples=lambda good: good[len(good) // 2 :][:_SHORT_SAMPLES]),
}  # fmt: skip
_SINGLE: Final = _Defect("single_utterance_speaker", "{0}/{0}_only.flac")

# The reason code of each kind, those included that are not made of any speech.
DEFECTS: Final[dict[str, str]] = {
    **{name: defect.reason for name, defect in _MADE.items()},
    "single_utterance": _SINGLE.reason,
    "not_json": "malformed",
    "duplicate": "duplicate_id",
}


def bad_records(utterances: Iterator[SpokenText], solo: SpokenText, good: Record) -> Iterator[Record | str]:
    """Yield a record of each kind, which names it in ``demo_defect``; the one that is a text is no JSON.

    Args:
        utterances: good speech, one utterance for each kind.
        solo: the only utterance of its speaker.
        good: the record to be duplicated.
    """
    for name, defect in _MADE.items():
        yield defect.make(next(utterances)) | {"demo_defect": name}
    yield _SINGLE.make(solo) | {"demo_defect": "single_utterance"}
    yield _NOT_JSON
    yield good | {"demo_defect": "duplicate"}
