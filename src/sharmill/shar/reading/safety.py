"""Limits on the manifests in a dataset: they may refer to data in it, and name the paths that data came from.

lhotse's manifests can do more: a recording may be the output of a command or the answer of a server, an array a pickle.
Whoever loads it runs it, so that a dataset from elsewhere must not have it.
"""

from __future__ import annotations

from typing import Any, Final

SAFE_SOURCES: Final = frozenset({"file", "shar", "memory"})
_SAFE_ARRAYS: Final = frozenset({"shar", "memory_npy", "memory_lilcom"})
_RECORDING_KEYS: Final = frozenset({"id", "sources", "sampling_rate"})


def forbidden_source(values: Any) -> str | None:
    """Describe the first thing in a cut, or in a part of one, that must not be loaded; None if there is none.

    Raises:
        LookupError, AttributeError, TypeError: a recording is not made as recordings are.
    """
    if isinstance(values, dict):
        if found := _forbidden(values):
            return found
        values = values.values()
    elif not isinstance(values, list):
        return None
    return next((found for value in values if (found := forbidden_source(value))), None)


def _forbidden(manifest: dict[str, Any]) -> str | None:
    if manifest.keys() >= _RECORDING_KEYS:
        kinds = {str(source["type"]) for source in manifest["sources"]}
        if not kinds <= SAFE_SOURCES:
            return f"a source of type {sorted(kinds - SAFE_SOURCES)[0]!r}"
    kind = manifest.get("storage_type")
    # Without a shape or features it is a mapping of the manifest's own.
    if kind is not None and ("shape" in manifest or "num_features" in manifest) and kind not in _SAFE_ARRAYS:
        return f"data of type {kind!r}"
    return None


def is_given_to_a_shell(source: dict[str, Any]) -> bool:
    """Return True if lhotse gives the name of this source to a shell as it stands; a file may have any name."""
    return source["type"] == "file" and str(source["source"]).lower().endswith(".sph")


def block_sph_sources(values: Any) -> None:
    """Make recordings in ``.sph`` files, in a cut or a part of one, name their origin without being loadable."""
    if isinstance(values, dict):
        if values.keys() >= _RECORDING_KEYS:
            for source in values["sources"]:
                if is_given_to_a_shell(source):
                    source["type"] = "shar"
        values = values.values()
    elif not isinstance(values, list):
        return
    for value in values:
        block_sph_sources(value)
