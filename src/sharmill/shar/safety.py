"""What the manifests in a dataset may refer to: data that lies in the dataset, and paths that say where it came from.

lhotse's manifests can do more: a recording may be the output of a command or the answer of a server, an array a pickle.
Whoever loads it runs it, so that a dataset from elsewhere must not have it.
"""

from __future__ import annotations

from typing import Any, Final

_RECORDINGS: Final = frozenset({"file", "shar", "memory"})
_ARRAYS: Final = frozenset({"shar", "memory_npy", "memory_lilcom"})
# Attributes of a cut and of a supervision that lhotse makes objects of; in ``custom``, mappings that look like those.
_MANIFESTS: Final = ("recording", "features", "video")


def forbidden_source(cut: dict[str, Any]) -> str | None:
    """The first thing in a cut that must not be loaded, in words, or None.

    Raises:
        AttributeError, TypeError: the cut is not made as cuts are.
    """
    owners = [cut, *(cut.get("supervisions") or ())]
    manifests = [cut.get(name) for name in _MANIFESTS]
    manifests += [value for owner in owners for value in (owner.get("custom") or {}).values()]
    for manifest in manifests:
        if isinstance(manifest, dict) and (found := _forbidden(manifest)):
            return found
    return None


def _forbidden(manifest: dict[str, Any]) -> str | None:
    if {"id", "sources", "sampling_rate"} <= manifest.keys():
        kinds = {str(source["type"]) for source in manifest["sources"]}
        if not kinds <= _RECORDINGS:
            return f"a source of type {sorted(kinds - _RECORDINGS)[0]!r}"
    array = manifest.get("array", manifest)
    kind = array.get("storage_type") if isinstance(array, dict) else None
    # Without a shape it is a mapping of the manifest's own.
    if kind is not None and "shape" in array and kind not in _ARRAYS:
        return f"an array of type {kind!r}"
    if "storage_type" in manifest and "num_features" in manifest and kind not in _ARRAYS:
        return f"features of type {kind!r}"
    return None


def disarm(cut: dict[str, Any]) -> None:
    """Makes a recording that lies in a ``.sph`` file say where it came from, and no more.

    lhotse gives the name of such a file to a shell as it stands, and a file may have any name.
    """
    for source in (cut.get("recording") or {}).get("sources", ()):
        if source["type"] == "file" and str(source["source"]).lower().endswith(".sph"):
            source["type"] = "shar"
