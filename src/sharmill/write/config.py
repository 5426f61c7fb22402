"""Keys of the stage ``write``."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Final, Literal

import msgspec

from sharmill.config import Positive, Presence, StageSection, require

_DEFAULT_SHARD_SIZE: Final = 1000


@dataclass(frozen=True, kw_only=True)
class WriteConfig(StageSection):
    """Form of the shards: their size, their order and the format of their audio."""

    presence: ClassVar[Presence] = "always"
    alternatives: ClassVar[Sequence[str]] = ("shard_size", "num_shards", "shard_seconds")

    shard_size: Positive | None = None
    """Number of cuts in one shard; 1000 where neither this nor one of the next two keys is given. Only one can be
    given; one on the command line replaces that of the file."""
    num_shards: Positive | None = None
    """Number of shards. Their numbers of cuts differ by one at most; there are never more shards than cuts."""
    shard_seconds: float | None = None
    """Seconds of target audio in one shard, about: the number of shards is the total divided by this, rounded, and
    each shard ends where the sum so far is closest to its share."""
    audio_format: Literal["flac", "wav", "mp3", "opus", "original"] = "flac"
    """Format of the stored audio; ``original`` is that of each source file (FLAC where it cannot be written). A
    record that is a whole mono file in this format and at ``sampling_rate`` is copied byte for byte. All other
    FLAC and WAV have 16 bits: samples of more bits are rounded. Samples beyond full scale are clipped and counted. Opus
    and MP3 have libsndfile's variable bit rates: for speech at 16, 24 and 48 kHz about 28, 37 and 62 kbit/s (Opus) and
    43, 55 and 68 kbit/s (MP3)."""
    sampling_rate: Positive | None = None
    """Sampling rate of the stored audio, in Hz; ``null`` keeps the rate of each recording."""
    order: Literal["manifest", "speaker", "shuffle"] = "shuffle"
    """Order of the cuts: as in the manifest, by speaker group (by speaker where ``match`` is null), or shuffled by
    ``seed``."""
    seed: Annotated[int, msgspec.Meta(ge=0)] = 42
    """Seed of ``order: shuffle``."""

    def __post_init__(self) -> None:
        given = {name: value for name in self.alternatives if (value := getattr(self, name)) is not None}
        is_usable = self.shard_seconds is None or 0 < self.shard_seconds < math.inf
        require(is_usable, "shard_seconds must be a positive number")
        named = " and ".join(f"{name} ({value:g})" for name, value in given.items())
        require(len(given) < 2, f"{named} are given, and only one of them can be: set the others to null")
        if not given:
            object.__setattr__(self, "shard_size", _DEFAULT_SHARD_SIZE)
