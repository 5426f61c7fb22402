"""Speech synthesis for the demo corpus with libespeak-ng, which is called through ctypes.

The library and its data come from the package ``espeakng-loader``, which is imported when an ``Espeak`` object is
created. The voices of the corpus are defined in ``corpus``.
"""

import contextlib
import ctypes
import importlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from sharmill.errors import ConfigError

# Constants of espeak-ng's speak_lib.h.
_AUDIO_OUTPUT_SYNCHRONOUS: Final = 2
_INITIALIZE_DONT_EXIT: Final = 0x8000
_CHARS_UTF8: Final = 1
_POSITION_CHARACTER: Final = 1
_PARAMETER_IDS: Final[dict[str, int]] = {"rate": 1, "pitch": 3, "pitch_range": 4}

_SAMPLING_RATE: Final = 22050
_RANDOM_SEED: Final = 1

_SYNTH_ARGUMENTS: Final = (
    ctypes.c_char_p, ctypes.c_size_t, ctypes.c_uint, ctypes.c_int, ctypes.c_uint, ctypes.c_uint, ctypes.c_void_p,
    ctypes.c_void_p,
)  # fmt: skip
_SynthCallback = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_short), ctypes.c_int, ctypes.c_void_p)


@dataclass(frozen=True)
class VoiceSettings:
    """Settings of a voice, in espeak's units.

    Args:
        name: language and variant, such as ``en-us+f5``; variants are files in ``voices/!v`` of espeak's data.
        rate: words per minute, 80 to 450.
        pitch: base pitch, 0 to 99.
        pitch_range: 0 (monotone) to 99.
    """

    name: str
    rate: int = 175
    pitch: int = 50
    pitch_range: int = 50


class Espeak:
    """Speech synthesizer for use from one thread.

    The samples depend only on the text and the settings, not on the process or on earlier calls. Variants with
    espeak's Klatt synthesizer, such as Reed, are an exception: they differ between runs.

    Raises:
        ConfigError: ``espeakng-loader`` is not installed.

    >>> espeak = Espeak()
    >>> samples = espeak.synthesize("Good morning.", VoiceSettings(name="en-us+f5"))
    >>> samples.dtype, samples.ndim, espeak.sampling_rate
    (dtype('int16'), 1, 22050)
    """

    sampling_rate: Final = _SAMPLING_RATE

    def __init__(self) -> None:
        try:
            loader = importlib.import_module("espeakng_loader")
        except ImportError as error:
            raise ConfigError(
                "the demo corpus needs espeak-ng: run pip install 'sharmill[demo]'",
                code="missing_package",
            ) from error
        self._library_path = str(loader.get_library_path())
        self._data_path = str(loader.get_data_path())

    def synthesize(self, text: str, voice: VoiceSettings) -> NDArray[np.int16]:
        """Return speech for ``text`` as mono samples, shape (time,), at ``sampling_rate``.

        Raises:
            ConfigError: the voice does not exist, or espeak-ng cannot read its data.
        """
        chunks: list[NDArray[np.int16]] = []

        def collect(samples: Any, num_samples: int, _events: int | None) -> int:
            if samples and num_samples > 0:
                chunks.append(np.ctypeslib.as_array(samples, shape=(num_samples,)).copy())
            return 0

        # The library stores only the address of the callback, so this variable must keep the object alive.
        callback = _SynthCallback(collect)
        with _fresh_library(self._library_path) as library:
            data = self._data_path.encode()
            rate = library.espeak_Initialize(_AUDIO_OUTPUT_SYNCHRONOUS, 0, data, _INITIALIZE_DONT_EXIT)
            if rate != _SAMPLING_RATE:
                raise ConfigError(
                    f"espeak-ng cannot read its data in {self._data_path!r} (it returned {rate}): reinstall "
                    "espeakng-loader",
                    code="missing_package",
                )
            # By default, the random generator for breath noise is seeded with the time.
            library.espeak_ng_SetRandSeed(ctypes.c_long(_RANDOM_SEED))
            library.espeak_SetSynthCallback(callback)
            if library.espeak_SetVoiceByName(voice.name.encode()) != 0:
                raise ConfigError(f"espeak-ng has no voice {voice.name!r}", code="bad_config_value")
            for field, parameter in _PARAMETER_IDS.items():
                library.espeak_SetParameter(parameter, getattr(voice, field), 0)
            encoded = text.encode() + b"\0"
            library.espeak_Synth.argtypes = _SYNTH_ARGUMENTS
            if library.espeak_Synth(encoded, len(encoded), 0, _POSITION_CHARACTER, 0, _CHARS_UTF8, None, None) != 0:
                raise RuntimeError(f"espeak-ng failed on {text!r}")
        return np.concatenate(chunks) if chunks else np.zeros(0, np.int16)


@contextlib.contextmanager
def _fresh_library(path: str) -> Iterator[ctypes.CDLL]:
    """Load the library, and unload it at the end of the context.

    The library keeps flutter and wave phase in static variables that neither espeak_Initialize nor
    espeak_SetVoiceByName resets, so each utterance would depend on earlier ones. Loading takes about 5 ms.
    """
    library = ctypes.CDLL(path)
    close = ctypes.CDLL(None).dlclose
    close.argtypes = [ctypes.c_void_p]
    try:
        yield library
    finally:
        library.espeak_Terminate()
        close(library._handle)
