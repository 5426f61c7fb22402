"""The speakers of a finished dataset, and which of them go into which split.

Speakers stay together if one has contexts from a recording of the other, as with ``speaker_key: all``: what is a
context in one split is never a target in another.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from sharmill.errors import ConfigError, DamagedShard, RejectRecord
from sharmill.grow.parts import SourceDataset, hash_text
from sharmill.shar.cut_lines import decode_line, read_lines
from sharmill.shar.layout import CUTS
from sharmill.sources.speakers import NO_SPEAKER
from sharmill.speaker_tag import parse_speaker_tag


class _Custom(msgspec.Struct):
    context_recording_id: str | None = None


class _Supervision(msgspec.Struct):
    speaker: str | None = None
    custom: _Custom = msgspec.field(default_factory=_Custom)


class _Recording(msgspec.Struct):
    id: str


class _Cut(msgspec.Struct):
    id: str
    duration: float
    supervisions: list[_Supervision]
    recording: _Recording


_decoder = msgspec.json.Decoder(_Cut)


@dataclass(frozen=True)
class SpeakerTable:
    """The speakers of all cuts, and the groups of speakers that stay together.

    Attributes:
        speakers: name of each speaker: dataset and speaker of the tag.
        groups: group of each speaker, (speakers,): the number of the first speaker in it.
        speaker_of: speaker of each cut, (cuts,), in the order of the dataset.
        seconds: of each cut, (cuts,).
    """

    speakers: list[str]
    groups: np.ndarray
    speaker_of: np.ndarray
    seconds: np.ndarray

    @classmethod
    def read(cls, part: SourceDataset) -> SpeakerTable:
        """Read the cuts of a dataset.

        Raises:
            ConfigError: a cut has no speaker.
            DamagedShard: a file of cuts cannot be read.
        """
        numbers: dict[str, int] = {}
        columns = np.zeros(part.record.num_cuts, [("speaker", "i8"), ("seconds", "f8"), ("own", "u8"), ("other", "u8")])
        position = 0
        for shard in part.shards:
            path = part.directory / shard.fields[CUTS].file
            lines = read_lines(path)
            if len(lines) != shard.count:
                raise DamagedShard(f"{path}: {len(lines)} cuts instead of {shard.count}")
            for line in lines:
                cut = decode_line(path, line, _decoder)
                supervision = cut.supervisions[0] if cut.supervisions else _Supervision()
                number = numbers.setdefault(_speaker(cut.id, supervision.speaker), len(numbers))
                context = supervision.custom.context_recording_id
                columns[position] = (
                    number,
                    cut.duration,
                    hash_text(cut.recording.id),
                    hash_text(context) if context else 0,
                )
                position += 1
        groups = _unite(len(numbers), columns["speaker"], columns["own"], columns["other"])
        return cls(list(numbers), groups, columns["speaker"].astype(np.int32), columns["seconds"].copy())

    def assign(self, shares: Mapping[str, float], seed: int) -> dict[str, np.ndarray]:
        """Return the numbers of the cuts of each split, in order; ``train`` has what the others leave.

        The groups are gone through in an order that their names and the seed make. A split takes each that brings it
        nearer to its share of the seconds.

        Args:
            shares: of the other splits, of all seconds.

        Raises:
            ConfigError: there are fewer groups than splits.
        """
        members = np.unique(self.groups)
        if len(members) <= len(shares):
            apart = len(members) < len(self.speakers)
            raise ConfigError(
                f"{len(shares) + 1} splits need as many speakers, and the dataset has {len(members)}"
                + (f" groups of its {len(self.speakers)} speakers: one has contexts from recordings of the other, "
                   "so they must stay together" if apart else ""),
                code="too_few_speakers",
            )  # fmt: skip
        group_of = self.groups[self.speaker_of]
        seconds = np.bincount(group_of, weights=self.seconds, minlength=len(self.speakers))
        left = sorted(members.tolist(), key=lambda group: (hash_text(f"{seed}\n{self.speakers[group]}"), group))
        result = {}
        for number, (split, share) in enumerate(shares.items()):
            chosen = _fill(left, seconds, share * float(seconds.sum()), num_kept=len(shares) - number)
            left = [group for group in left if group not in chosen]
            result[split] = np.flatnonzero(np.isin(group_of, sorted(chosen)))
        return {"train": np.flatnonzero(np.isin(group_of, left))} | result

    def count_speakers(self, cuts: np.ndarray) -> int:
        """Return how many speakers some cuts have."""
        return len(np.unique(self.speaker_of[cuts]))


def _fill(groups: Sequence[int], seconds: np.ndarray, wanted: float, *, num_kept: int) -> set[int]:
    """Return the groups of a split: at least one, and so many that ``num_kept`` are left at least."""
    chosen: set[int] = set()
    have = 0.0
    for group in groups:
        if len(groups) - len(chosen) == num_kept:
            break
        if abs(have + seconds[group] - wanted) < abs(have - wanted):
            chosen.add(group)
            have += seconds[group]
    return chosen or {min(groups, key=lambda group: seconds[group])}


def _unite(num_speakers: int, speakers: np.ndarray, own: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Return the group of each speaker: those whose recordings (``own``) the contexts (``other``) of another are from.

    ``own`` and ``other`` are the hashes of recording ids of each cut, (cuts,); 0 stands for no context.
    """
    groups = np.arange(num_speakers)
    owners = np.unique(np.stack([own, speakers.astype(np.uint64)], axis=1), axis=0)
    users = np.unique(np.stack([other, speakers.astype(np.uint64)], axis=1), axis=0)
    first = np.searchsorted(owners[:, 0], users[:, 0], side="left")
    last = np.searchsorted(owners[:, 0], users[:, 0], side="right")
    for (_, user), start, stop in zip(users.tolist(), first.tolist(), last.tolist(), strict=True):
        for owner in owners[start:stop, 1].tolist():
            left, right = sorted((int(groups[user]), int(groups[owner])))
            if left != right:
                groups[groups == right] = left
    return groups


def _speaker(cut_id: str, speaker: str | None) -> str:
    """Return the name of a speaker, without what a tag says beside it: a speaker of two languages is one."""
    try:
        tag = parse_speaker_tag(speaker or "")
    except RejectRecord:
        name = speaker
    else:
        name = f"{tag.dataset} {tag.speaker}" if tag.speaker != NO_SPEAKER else None
    if not name:
        raise ConfigError(
            f"the cut {cut_id} has no speaker, so that it cannot be split by speaker; give all records speakers",
            code="no_speaker",
        )
    return name
