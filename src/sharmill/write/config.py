"""Keys of the stage ``write``."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

from sharmill.config import Presence, StageSection, require

_DEFAULT_SHARD_SIZE = 1000


@dataclass(frozen=True, kw_only=True)
class WriteConfig(StageSection):
    """Form of the shards: their size, their order and the format of their audio."""

    presence: ClassVar[Presence] = "always"

    shard_size: int | None = None
    """Number of cuts in one shard; 1000 where neither this nor one of the next two keys is given. Of the three keys one
    can be given: on the command line, ``write.shard_size=null write.num_shards=64`` replaces the one in the file."""
    num_shards: int | None = None
    """Number of shards. Their numbers of cuts differ by one at most; there are never more shards than cuts."""
    shard_seconds: float | None = None
    """Target audio in one shard, in seconds, about: the number of shards is the total divided by this, rounded, and
    each shard ends where the sum so far is closest to its share. Equal hours are what training balances on."""
    audio_format: Literal["flac", "wav", "mp3", "opus", "original"] = "flac"
    """Format of the stored audio; ``original`` is that of each source file (FLAC where it cannot be written). A record
    that is a whole mono file in this format and at ``sampling_rate`` is copied byte for byte. Opus and MP3 are written
    at the variable bit rates of libsndfile, which cannot be changed: for speech at 16, 24 and 48 kHz about 28, 37 and
    62 kbit/s (Opus) and 43, 55 and 68 kbit/s (MP3)."""
    sampling_rate: int | None = None
    """Sampling rate of the stored audio, in Hz; ``null`` keeps the rate of each recording."""
    order: Literal["manifest", "speaker", "shuffle"] = "shuffle"
    """Order of the cuts: as in the manifest, by speaker group (by speaker where ``match`` is null), or shuffled by
    ``seed``."""
    seed: int = 42
    """Seed of ``order: shuffle``."""

    def __post_init__(self) -> None:
        sizes = {name: getattr(self, name) for name in ("shard_size", "num_shards", "shard_seconds")}
        given = {name: value for name, value in sizes.items() if value is not None}
        for name, value in given.items():
            require(0 < value < math.inf, f"{name} must be a positive number")
        named = " and ".join(f"{name} ({value:g})" for name, value in given.items())
        require(len(given) < 2, f"{named} are given, and only one of them can be: set the others to null")
        if not given:
            object.__setattr__(self, "shard_size", _DEFAULT_SHARD_SIZE)
        require(self.sampling_rate is None or self.sampling_rate > 0, "sampling_rate must be positive")
        require(self.seed >= 0, "seed must not be negative")
