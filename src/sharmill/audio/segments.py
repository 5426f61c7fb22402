"""Where the samples of a manifest's segments lie, and how they are read."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from sharmill.audio.files import AudioInfo, probe, read
from sharmill.audio.resample import segment_bounds
from sharmill.audio.roots import AudioRoots
from sharmill.errors import RejectRecord
from sharmill.manifest import Segment


@dataclass(frozen=True)
class Location:
    """A segment as samples of a file: ``start`` and ``num_samples`` at the file's own rate."""

    path: Path
    info: AudioInfo
    start: int
    num_samples: int

    @property
    def is_whole_file(self) -> bool:
        return self.start == 0 and self.num_samples == self.info.num_samples


@dataclass(frozen=True)
class SegmentReader:
    """Reads segments below the audio roots of the sources, in their order in the configuration."""

    roots: AudioRoots

    def locate(self, segment: Segment) -> Location:
        """Raises RejectRecord where the file is missing, unreadable or outside its root, or the segment is empty."""
        # A link may have changed since the stage prepare saw it.
        path = self.roots.locate(segment)
        info = probe(path)
        if segment.whole_file:
            return Location(path, info, 0, info.num_samples)
        start, num_samples = segment_bounds(segment.offset, segment.duration, info.sampling_rate)
        # The header check allows a segment to end a little after its file; there are no samples there.
        num_samples = min(num_samples, info.num_samples - start)
        if num_samples <= 0:
            raise RejectRecord("empty_audio", "the segment has no samples")
        return Location(path, info, start, num_samples)

    def read(self, segment: Segment) -> tuple[np.ndarray, int]:
        """The samples, float32 of shape (samples,), and their rate.

        Raises:
            RejectRecord: the audio cannot be used.
        """
        location = self.locate(segment)
        if location.is_whole_file:
            return read(location.path)
        return read(location.path, location.start, location.num_samples)
