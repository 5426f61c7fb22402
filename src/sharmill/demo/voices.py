"""The speakers of the demo corpus, with the voice of each, and what they say.

The variants were picked by measurement: among espeak's own, they are the twelve whose closest pair is the
least similar to the resemblyzer speaker encoder. Audio files are the same, byte for byte, for the same samples, which
the float format of WAV is not by itself.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Final

import numpy as np
import soundfile
from numpy.typing import NDArray

from sharmill.demo.espeak import Espeak, VoiceSettings
from sharmill.errors import ConfigError

# Durations of an utterance in seconds; a sentence that comes out shorter or longer is replaced.
_MIN_DURATION: Final = 1.0
_MAX_DURATION: Final = 12.0

_LEVEL: Final = 0.08  # root mean square of the speech, relative to full scale

# Rate, pitch and range of the pitch of each speaker.
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
# Of a speaker beside the others, who has one utterance only, so that nothing can be its context.
SOLO_VOICE: Final = VoiceSettings("en-gb-scotland+m3", 170, 50, 50)


class Speaker:
    """A voice that says texts, each a little faster or slower."""

    def __init__(self, name: str, voice: VoiceSettings, espeak: Espeak, *, seed: int) -> None:
        self.name = name
        self._voice = voice
        self.sampling_rate = espeak.sampling_rate
        self._espeak = espeak
        self._rng = np.random.default_rng([seed, *name.encode()])

    def say(self, text: str) -> NDArray[np.int16] | None:
        """Return speech for ``text``, shape (time,); None where it is not between the limits on the duration.

        The n-th utterance of a speaker has its own rate, within 5 % of the voice's.
        """
        rate = round(self._voice.rate * self._rng.uniform(0.95, 1.05))
        speech = self._espeak.synthesize(text, dataclasses.replace(self._voice, rate=rate))
        if not _MIN_DURATION <= len(speech) / self.sampling_rate <= _MAX_DURATION:
            return None
        samples = speech.astype(np.float64)
        samples *= _LEVEL / np.sqrt(np.mean(samples**2))
        return np.round(np.clip(samples, -1.0, 1.0) * 32767).astype(np.int16)

    def silence(self, seconds: float) -> NDArray[np.int16]:
        """Return a pause, shape (time,)."""
        return np.zeros(round(seconds * self.sampling_rate), np.int16)


def make_speakers(espeak: Espeak, *, num_voices: int, seed: int) -> list[Speaker]:
    """Return the first ``num_voices`` speakers.

    Raises:
        ConfigError: there are not that many voices.
    """
    if not 1 <= num_voices <= len(VOICES):
        raise ConfigError(
            f"num_voices is {num_voices}; the demo corpus has 1 to {len(VOICES)} voices", code="bad_config_value"
        )
    return [Speaker(name, voice, espeak, seed=seed) for name, voice in islice(VOICES.items(), num_voices)]


Record = dict[str, Any]
Samples = NDArray[np.int16] | NDArray[np.float32]


@dataclass(frozen=True)
class SpokenText:
    """Samples of shape (time,) that a speaker said, not yet on disk."""

    audio_root: Path
    speaker: Speaker
    text: str
    samples: NDArray[np.int16]

    @property
    def duration(self) -> float:
        """Length in seconds."""
        return len(self.samples) / self.speaker.sampling_rate

    def record(self, path: str, *, duration: float | None = None) -> Record:
        """Return a manifest record; ``path`` is relative to the audio root, ``duration`` by default its own."""
        return {
            "audio_filepath": path,
            "duration": round(self.duration if duration is None else duration, 6),
            "text": self.text,
            "speaker": f"| Language:en Dataset:Demo Speaker:{self.speaker.name} |",
        }

    def write(self, path: str, samples: Samples | None = None) -> Record:
        """Write the samples (its own if none are given) to a path relative to the audio root; return their record."""
        samples = self.samples if samples is None else samples
        write_audio(self.audio_root / path, samples, self.speaker.sampling_rate)
        return self.record(path, duration=len(samples) / self.speaker.sampling_rate)


def write_audio(path: Path, samples: Samples, sampling_rate: int) -> None:
    """Write samples, shape (time,) or (time, channels), in the format that the suffix of ``path`` names."""
    path.parent.mkdir(parents=True, exist_ok=True)
    subtype = "FLOAT" if samples.dtype == np.float32 else "PCM_16"
    soundfile.write(path, samples, sampling_rate, subtype=subtype)
    if subtype == "FLOAT":
        content = bytearray(path.read_bytes())
        # libsndfile puts the time of writing into this chunk: name, size, version, time, each of four bytes.
        if (chunk := content.find(b"PEAK")) >= 0:
            content[chunk + 12 : chunk + 16] = bytes(4)
            path.write_bytes(content)
