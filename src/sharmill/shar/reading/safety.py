"""Limits on the manifests in a dataset: they may refer to data in it, and name the paths that data came from.

lhotse's manifests can do more: a recording may be the output of a command or the answer of a server, an array a pickle,
and a transform may have a recording of its own. Whoever loads it runs it, so that a dataset from elsewhere must not
have it. The stage ``prepare``, the reader and the checker all ask this module.
"""

from __future__ import annotations

from typing import Any, Final

SAFE_SOURCES: Final = frozenset({"file", "shar", "memory"})
_SAFE_STORAGE: Final = frozenset({"shar", "memory_npy", "memory_lilcom"})
# Keys by which lhotse takes a mapping with a storage type for an array, features or an image.
_STORED: Final = ("shape", "num_features", "width")
_RECORDING_KEYS: Final = frozenset({"id", "sources", "sampling_rate"})
_MIXED_CUT_KEYS: Final = frozenset({"id", "tracks"})
# lhotse's own, none of which runs or opens anything but the recording in it; the classes know their other keys.
_TRANSFORMS: Final = frozenset({
    "Clipping", "Compress", "DereverbWPE", "LoudnessNormalization", "Narrowband", "Resample",
    "ReverbWithImpulseResponse", "Speed", "Tempo", "Volume",
})  # fmt: skip


def find_forbidden(values: Any) -> str | None:
    """Describe a thing that must not be loaded, anywhere in a cut, in metadata, or in a part of them; None without one.

    Nothing is taken on trust about the form of ``values``, which are JSON.
    """
    pending = [values]
    while pending:
        value = pending.pop()
        if isinstance(value, dict):
            if found := _forbidden(value):
                return found
            pending += [child for child in value.values() if isinstance(child, (dict, list))]
        elif isinstance(value, list):
            pending += [child for child in value if isinstance(child, (dict, list))]
    return None


def _forbidden(manifest: dict[str, Any]) -> str | None:
    is_recording = manifest.keys() >= _RECORDING_KEYS
    if is_recording and (kind := _first_other(manifest["sources"], "type", SAFE_SOURCES)):
        return f"a source of type {kind}"
    transforms = manifest.get("transforms") if is_recording or manifest.keys() >= _MIXED_CUT_KEYS else None
    if transforms and (name := _first_other(transforms, "name", _TRANSFORMS)):
        return f"a transform called {name}"
    kind = manifest.get("storage_type")
    # Without these keys it is a mapping of the manifest's own.
    if kind is not None and str(kind) not in _SAFE_STORAGE and any(key in manifest for key in _STORED):
        return f"data of type {kind!r}"
    return None


def _first_other(parts: Any, key: str, allowed: frozenset[str]) -> str | None:
    """Return the first value of ``key`` in the mappings ``parts`` that is not allowed, as text."""
    for part in parts if isinstance(parts, list) else [parts]:
        value = part.get(key) if isinstance(part, dict) else part
        if not isinstance(value, str) or not isinstance(part, dict) or value not in allowed:
            return repr(value)
    return None


def is_given_to_a_shell(source: dict[str, Any]) -> bool:
    """Return True if lhotse gives the name of this source to a shell as it stands; a file may have any name."""
    return source["type"] == "file" and str(source["source"]).lower().endswith(".sph")


def block_sph_sources(values: Any) -> None:
    """Make recordings in ``.sph`` files, in a cut or a part of one, name their origin without being loadable."""
    pending = [values]
    while pending:
        value = pending.pop()
        if isinstance(value, dict):
            if value.keys() >= _RECORDING_KEYS:
                for source in value["sources"]:
                    if is_given_to_a_shell(source):
                        source["type"] = "shar"
            pending += value.values()
        elif isinstance(value, list):
            pending += value
