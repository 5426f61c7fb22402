"""The files of a shard that a reader opens."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from sharmill.files.location import Location


@dataclass(frozen=True, slots=True)
class ShardFiles:
    """The files of a shard that a reader opens.

    Args:
        index: the shard's number, for messages.
        cuts: the file of its cuts.
        fields: the files of the chosen fields, by the attribute of the cut that each one fills.
        count: the expected number of cuts, if known.
        sidecars: the files for random access, with the keys of ``fields`` and ``cuts``; empty if there are none.
        lines: the lines of the file of cuts, if they have been read already.
    """

    index: int
    cuts: Location
    fields: Mapping[str, Location]
    count: int | None
    sidecars: Mapping[str, list[Location]] = field(default_factory=dict)
    lines: list[bytes] | None = None

    @property
    def locations(self) -> list[Location]:
        return [self.cuts, *self.fields.values()]
