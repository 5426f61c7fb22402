"""Configuration keys of the stage ``write``."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Final, Literal

import msgspec

from sharmill.config import Positive, Presence, StageSection, require

_DEFAULT_SHARD_SIZE: Final = 1000


@dataclass(frozen=True, kw_only=True)
class WriteConfig(StageSection):
    """Size of the shards, order of the cuts, and format of the audio."""

    presence: ClassVar[Presence] = "always"
    alternatives: ClassVar[Sequence[str]] = ("shard_size", "num_shards", "shard_seconds")

    shard_size: Positive | None = None
    """Number of cuts per shard; 1000 without this and the next two keys. Only one of the three can be given; one on the
    command line replaces one in the file."""
    num_shards: Positive | None = None
    """Number of shards, at most one per cut. Their sizes differ by at most one cut."""
    shard_seconds: float | None = None
    """Approximate seconds of target audio per shard."""
    audio_format: Literal["flac", "wav", "mp3", "opus", "original"] = "flac"
    """Format of the stored audio; ``original`` keeps the format of each source file, or uses FLAC if that cannot be
    written. Records that are whole mono files in this format and at ``sampling_rate`` are copied byte for byte. Other
    FLAC and WAV audio is stored with 16 bits, rounded if necessary. Samples beyond full scale are clipped and counted.
    Bit rates of Opus and MP3 vary: for speech at 16, 24 and 48 kHz about 28, 37 and 62 kbit/s (Opus) and 43, 55 and 68
    kbit/s (MP3)."""
    sampling_rate: Positive | None = None
    """Sampling rate of the stored audio in Hz; ``null`` keeps the rate of each recording."""
    order: Literal["manifest", "speaker", "shuffle"] = "shuffle"
    """Order of the cuts: as in the manifest, by speaker group (by speaker if ``match`` is null), or shuffled with
    ``seed``."""
    seed: Annotated[int, msgspec.Meta(ge=0)] = 42
    """Random seed for ``order: shuffle``."""

    def __post_init__(self) -> None:
        given = {name: value for name in self.alternatives if (value := getattr(self, name)) is not None}
        is_usable = self.shard_seconds is None or 0 < self.shard_seconds < math.inf
        require(is_usable, "shard_seconds must be a positive number")
        named = " and ".join(f"{name} ({value:g})" for name, value in given.items())
        require(len(given) < 2, f"{named} exclude each other: set all but one to null")
        if not given:
            object.__setattr__(self, "shard_size", _DEFAULT_SHARD_SIZE)
