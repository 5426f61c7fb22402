"""Limits on manifests in a dataset: they may only refer to data in the dataset, and name the paths that it came from.

lhotse's manifests can do more: a recording may be the output of a command or the response of a server, an array may be
a pickle, and a transform may contain another recording. Loading such a manifest would run the command, query the server
or unpickle the array, so a dataset from another source must not contain one. The stage ``prepare``, the reader and the
checker all use this module.
"""

import math
import os
import re
import reprlib
import stat
from collections.abc import Container, Iterator
from pathlib import Path
from typing import Any, Final

from sharmill.audio.decoder import MAX_SAMPLING_RATE, MIN_SAMPLING_RATE
from sharmill.files.location import is_url

SAFE_SOURCES: Final = frozenset({"file", "shar", "memory"})
_RECORDING_KEYS: Final = frozenset({"id", "sources", "sampling_rate"})
# All keys of lhotse's class Recording.
RECORDING_KEYS: Final = _RECORDING_KEYS | {"num_samples", "duration", "channel_ids", "transforms"}
_SOURCE_KEYS: Final = frozenset({"type", "channels", "source", "video"})
_Limits = tuple[float, float]
# The form of a setting: a number within limits, a list of such numbers, or a value of another type.
_Form = _Limits | list[_Limits] | type
_ANY: Final = (-1e6, 1e6)
_RATES: Final = (float(MIN_SAMPLING_RATE), float(MAX_SAMPLING_RATE))
_FACTORS: Final = (0.1, 10.0)
# lhotse's own transforms and their settings. None of them runs a program, or opens anything but a recording in its
# settings.
_TRANSFORMS: Final[dict[str, dict[str, _Form]]] = {
    "Clipping": {"hard": bool, "gain_db": _ANY, "normalize": bool},
    "Compress": {"codec": str, "compression_level": _ANY},
    "DereverbWPE": {"n_fft": (1, 65536), "hop_length": (1, 65536), "taps": (1, 1000), "delay": (0, 1000),
                    "iterations": (0, 100), "statistics_mode": str},
    "LoudnessNormalization": {"target": _ANY},
    "Narrowband": {"codec": str, "source_sampling_rate": _RATES, "restore_orig_sr": bool},
    "Resample": {"source_sampling_rate": _RATES, "target_sampling_rate": _RATES},
    "ReverbWithImpulseResponse": {"rir": dict, "normalize_output": bool, "early_only": bool,
                                  "rir_channels": [(0, 1000)], "rir_generator": dict, "RIR_SCALING_FACTOR": _ANY},
    "Speed": {"factor": _FACTORS},
    "Tempo": {"factor": _FACTORS},
    "Volume": {"factor": _ANY},
}  # fmt: skip
_RIR_GENERATOR: Final[dict[str, _Form]] = {
    "sr": _RATES, "direct_range": [(-1000, 1000)], "max_T60": (0.01, 10.0), "alpha": (-100, 100), "a": (-100, 100),
    "b": (-100, 100), "tau": (-100, 100), "room_seed": (0, 2**64), "source_seed": (0, 2**64),
}  # fmt: skip
_MAY_BE_NONE: Final = frozenset({"compression_level", "rir", "rir_generator", "room_seed", "source_seed"})
# The maximum size of a resampling filter, in numbers. Rates without a common divisor need the largest filters: speeds
# of 0.95 and 1.05 at 22,050 Hz need 1.3 x 10^8 numbers.
_MAX_FILTER: Final = 2 * 10**8
# Names that begin with an FFmpeg protocol, stand for standard input, or lie in folders of devices (except for
# /dev/shm). No audio of a dataset came from there.
_NO_FILE: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.,-]+:|-$|/+(dev/+(?!shm/)|proc/|sys/)")


def find_forbidden(values: Any) -> str | None:
    """Describe the first part of a cut or of metadata that must not be loaded; return None if everything may be loaded.

    ``values`` may be any JSON value, of any structure.
    """
    return next((found for mapping in _mappings(values) if (found := _forbidden(mapping))), None)


def _mappings(values: Any) -> Iterator[dict[str, Any]]:
    """Yield all mappings in a JSON value, at any depth."""
    pending = [values]
    while pending:
        value = pending.pop()
        if isinstance(value, dict):
            yield value
            value = list(value.values())
        if isinstance(value, list):
            pending += [child for child in value if isinstance(child, (dict, list))]


def _forbidden(manifest: dict[str, Any]) -> str | None:
    is_recording = manifest.keys() >= _RECORDING_KEYS
    if is_recording and (found := _forbidden_in_recording(manifest)):
        return found
    transforms = manifest.get("transforms") if is_recording or manifest.keys() >= {"id", "tracks"} else None
    if transforms is not None:
        if not isinstance(transforms, list):
            return "transforms that are not a list"
        rate = manifest["sampling_rate"] if is_recording else None
        if transforms and is_recording and not _has_form(rate, _RATES):
            return f"transforms of audio of {reprlib.repr(rate)} Hz"
        if name := _first_other(transforms, "name", _TRANSFORMS):
            return f"a transform called {name}"
        for transform in transforms:
            if found := _forbidden_in_transform(transform, rate):
                return f"a transform {transform['name']} {found}"
    kind = manifest.get("storage_type")
    # With one of these keys, lhotse treats the mapping as an array, features or an image; otherwise it is user data.
    is_stored = any(key in manifest for key in ("shape", "num_features", "width"))
    if kind is not None and str(kind) not in ("shar", "memory_npy", "memory_lilcom") and is_stored:
        return f"data of type {kind!r}"
    return None


def _forbidden_in_recording(recording: dict[str, Any]) -> str | None:
    if not isinstance(recording["sources"], list):
        return "sources that are not a list"
    if kind := _first_other(recording["sources"], "type", SAFE_SOURCES):
        return f"a source of type {kind}"
    if unknown := recording.keys() - RECORDING_KEYS:
        return f"a recording with the key {min(unknown)!r}"
    for source in recording["sources"]:
        if unknown := source.keys() - _SOURCE_KEYS:
            return f"a source with the key {min(unknown)!r}"
        if source["type"] == "file" and is_url(str(source.get("source"))):
            return "a source of type 'file' that is a URL"
    return None


def _forbidden_in_transform(transform: dict[str, Any], rate: float | None) -> str | None:
    """Describe why a transform is refused: lhotse does not know its settings, or it would need too much memory.

    Return None if the transform is accepted.

    Args:
        rate: the sampling rate of the recording in Hz; None for a mixed cut, which has no rate.
    """
    settings = transform.get("kwargs")
    if transform.keys() - {"name", "kwargs"} or not isinstance(settings, dict):
        return "that is not in lhotse's form"
    if found := _outside(settings, _TRANSFORMS[transform["name"]]):
        return found
    generator = settings.get("rir_generator")
    if generator is not None and (found := _outside(generator, _RIR_GENERATOR)):
        return found
    if transform["name"] == "Speed" and rate is not None:
        rates = (round(rate * settings.get("factor", 1.0)), round(rate))
    else:
        rates = (settings.get("source_sampling_rate", 1), settings.get("target_sampling_rate", 8000))
    divisor = math.gcd(*rates) if all(type(value) is int for value in rates) else 0
    if not divisor or rates[0] * rates[1] / divisor**2 > _MAX_FILTER:
        return f"between {rates[0]} and {rates[1]} Hz"
    return None


def _outside(settings: dict[str, Any], known: dict[str, _Form]) -> str | None:
    """Describe the first setting that is unknown, has the wrong type, or is outside its limits.

    Return None if all settings are allowed.
    """
    for key, value in settings.items():
        if key not in known:
            return f"with the key {str(key)[:40]!r}"
        if not (_has_form(value, known[key]) or (value is None and key in _MAY_BE_NONE)):
            return f"with {key} {reprlib.repr(value)}"
    return None


def _has_form(value: Any, form: _Form) -> bool:
    if isinstance(form, type):
        return isinstance(value, form)
    if isinstance(form, list):
        return isinstance(value, list) and all(_has_form(number, form[0]) for number in value)
    return isinstance(value, (int, float)) and not isinstance(value, bool) and form[0] <= value <= form[1]


def _first_other(parts: list[Any], key: str, allowed: Container[str]) -> str | None:
    """Return, as text, the first value of ``key`` in the mappings ``parts`` that is not allowed.

    A part that is not a mapping is returned as a whole. Return None if all values are allowed.
    """
    for part in parts:
        value = part.get(key) if isinstance(part, dict) else part
        if not isinstance(value, str) or not isinstance(part, dict) or value not in allowed:
            return reprlib.repr(value)
    return None


def needs_more_than_open(source: dict[str, Any]) -> bool:
    """Return True if lhotse would do anything but open the file of this source; the file need not exist.

    lhotse passes names that end in ``.sph`` to a shell unescaped, and also names that end in ``.opus`` if an
    environment variable requests it. Its backends pass names to FFmpeg, which also opens URLs of many protocols.
    """
    if source["type"] != "file":
        return False
    name = source["source"]
    if not isinstance(name, str) or name[-4:].lower() == ".sph" or _NO_FILE.match(name) is not None:
        return True
    if "./" in name and _NO_FILE.match(os.path.normpath(name)) is not None:  # such as /tmp/../dev/zero
        return True
    return name[-5:].lower() == ".opus" and os.environ.get("LHOTSE_LEGACY_OPUS_LOADING") == "1"


def block_sources(values: Any) -> None:
    """Make the sources in a cut, or in a part of one, unloadable if they are not regular files.

    They remain as information about the origin of the audio.
    """
    for value in _mappings(values):
        if value.keys() >= _RECORDING_KEYS:
            for source in value["sources"]:
                if needs_more_than_open(source) or (source["type"] == "file" and is_device(source["source"])):
                    source["type"] = "shar"


def is_device(name: str) -> bool:
    """Return True if ``name`` is a FIFO, device or folder, since reading from one could block or never end."""
    try:
        return not stat.S_ISREG(Path(name).stat().st_mode)
    except (OSError, ValueError):
        return False
