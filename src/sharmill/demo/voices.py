"""The speakers of the demo corpus: the voice, the room and the microphone of each.

The variants were picked by measurement: among espeak's own, they are the twelve whose closest pair is the
least similar to the resemblyzer speaker encoder.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from sharmill.demo.espeak import Espeak, VoiceSettings
from sharmill.errors import ConfigError

# Durations of an utterance in seconds; a sentence that comes out shorter or longer is replaced.
MIN_DURATION: Final = 1.0
MAX_DURATION: Final = 12.0

_LEVEL: Final = 0.08  # root mean square of the speech, relative to full scale
_NOISE_LEVELS: Final = (0.0003, 0.0008)
_EQ_CENTRES: Final = (150.0, 500.0, 1200.0, 2500.0, 5000.0)
_EQ_GAIN_DB: Final = 2.5
_EQ_OCTAVES: Final = 0.7


@dataclass(frozen=True)
class Voice:
    """One speaker: a name for the manifest and espeak's settings."""

    speaker: str
    settings: VoiceSettings


def _voice(speaker: str, name: str, rate: int, pitch: int, pitch_range: int) -> Voice:
    return Voice(speaker, VoiceSettings(name=name, rate=rate, pitch=pitch, pitch_range=pitch_range))


VOICES: Final[tuple[Voice, ...]] = (
    _voice("ada", "en-us+f5", 170, 54, 55),
    _voice("ben", "en+david", 175, 45, 50),
    _voice("cora", "en+Alicia", 165, 52, 60),
    _voice("dan", "en-us+Gene", 180, 48, 45),
    _voice("ella", "en-gb-scotland+anika", 175, 55, 60),
    _voice("finn", "en-gb-scotland+Hugo", 165, 50, 40),
    _voice("gwen", "en-029+aunty", 160, 50, 50),
    _voice("hugh", "en-029+Lee", 170, 46, 50),
    _voice("iris", "en-us+steph2", 180, 52, 55),
    _voice("jack", "en+pablo", 170, 50, 45),
    _voice("kate", "en-029+kaukovalta", 165, 50, 55),
    _voice("liam", "en-us+sandro", 175, 50, 50),
)
_SOLO_VOICE: Final = _voice("solo", "en-gb-scotland+m3", 170, 50, 50)


class Speaker:
    """A voice in its room: everything that it says has the same equalisation and the same noise floor."""

    def __init__(self, voice: Voice, espeak: Espeak, *, seed: int) -> None:
        self.voice = voice
        self.name = voice.speaker
        self.sampling_rate = espeak.sampling_rate
        self._espeak = espeak
        self._rng = np.random.default_rng([seed, *voice.speaker.encode()])
        self._eq_gains_db = self._rng.uniform(-_EQ_GAIN_DB, _EQ_GAIN_DB, size=len(_EQ_CENTRES))
        self.noise_level = float(self._rng.uniform(*_NOISE_LEVELS))

    def say(self, text: str) -> NDArray[np.int16] | None:
        """Return speech for ``text``, shape (time,); None where it is not between the limits on the duration.

        The n-th utterance of a speaker has its own rate, within 5 % of the voice's, and its own noise.
        """
        rate = round(self.voice.settings.rate * self._rng.uniform(0.95, 1.05))
        speech = self._espeak.synthesize(text, dataclasses.replace(self.voice.settings, rate=rate))
        if not MIN_DURATION <= len(speech) / self.sampling_rate <= MAX_DURATION:
            return None
        coloured = self._equalize(speech.astype(np.float64))
        coloured *= _LEVEL / np.sqrt(np.mean(coloured**2))
        return self._quantize(coloured + self._noise(len(coloured)))

    def silence(self, seconds: float) -> NDArray[np.int16]:
        """Return the speaker's noise floor without speech, shape (time,)."""
        return self._quantize(self._noise(round(seconds * self.sampling_rate)))

    def _equalize(self, samples: NDArray[np.float64]) -> NDArray[np.float64]:
        frequencies = np.fft.rfftfreq(len(samples), 1 / self.sampling_rate)
        octaves = np.log2(np.maximum(frequencies, 20.0))[:, None] - np.log2(np.array(_EQ_CENTRES))
        gain_db = np.exp(-0.5 * (octaves / _EQ_OCTAVES) ** 2) @ self._eq_gains_db
        return np.fft.irfft(np.fft.rfft(samples) * 10 ** (gain_db / 20), n=len(samples))

    def _noise(self, num_samples: int) -> NDArray[np.float64]:
        return self._rng.normal(0.0, self.noise_level, size=num_samples)

    @staticmethod
    def _quantize(samples: NDArray[np.float64]) -> NDArray[np.int16]:
        return np.round(np.clip(samples, -1.0, 1.0) * 32767).astype(np.int16)


def make_speakers(espeak: Espeak, *, num_voices: int, seed: int) -> list[Speaker]:
    """Return the first ``num_voices`` speakers.

    Raises:
        ConfigError: there are not that many voices.
    """
    if not 1 <= num_voices <= len(VOICES):
        raise ConfigError(
            f"num_voices is {num_voices}; the demo corpus has 1 to {len(VOICES)} voices", code="bad_config_value"
        )
    return [Speaker(voice, espeak, seed=seed) for voice in VOICES[:num_voices]]


def make_solo(espeak: Espeak, *, seed: int) -> Speaker:
    """Return a speaker beside the others, who has one utterance only, so that nothing can be its context."""
    return Speaker(_SOLO_VOICE, espeak, seed=seed)
