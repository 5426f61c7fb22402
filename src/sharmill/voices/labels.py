"""Findings about speaker groups and their voices, and the names of the speakers to whom voices belong."""

from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise
from typing import Any, Final

import numpy as np

from sharmill.engine.stage import StageRun
from sharmill.files.arrays import map_stored_array
from sharmill.manifest import Utterance, read_utterances_at, tagged_speaker
from sharmill.stages.lines import OFFSET, column, hash_group
from sharmill.stages.speaker_key import key_of, make_speaker_key
from sharmill.voices.similarity import least_similarity

# Number of similarities that are computed together, 128 MiB, because a group may have as many voices as clips.
_BLOCK: Final = 1 << 24
# Voices that a finding about a group lists, the largest first.
_MOST_LISTED: Final = 20


class Labels:
    """The voices that were found, with their groups and the names of their speakers."""

    def __init__(self, run: StageRun) -> None:
        self.voices = map_stored_array(run.plan_folder / "voices.npy")
        self.directions = map_stored_array(run.plan_folder / "directions.npy")
        self._key = make_speaker_key(run.config.matched_key)
        self._least = least_similarity(run.config)
        self._manifest = run.product("voices.embed/manifest")
        self._offsets = map_stored_array(run.product(f"voices.embed/{OFFSET}"))
        self._known: dict[int, Utterance] = {}
        self._groups: set[int] = set()
        if run.settings.action == "relabel":
            self._groups = set(np.unique(column(run, "prepare", "group")[:, 0]).tolist())

    def read(self, lines: np.ndarray) -> list[Utterance]:
        """Return the utterances of lines (N,) of the manifest."""
        return read_utterances_at(self._manifest, self._offsets[lines])

    def first_of(self, line: int) -> Utterance:
        """Return the utterance of a line that is the first of a group or cluster; it is kept for later calls."""
        if line not in self._known:
            self._known[line] = self.read(np.array([line]))[0]
        return self._known[line]

    def group_of(self, line: int) -> str:
        """Return the key of the speaker group whose first line is given."""
        return key_of(self._key, self.first_of(line))

    def speaker_of(self, voice: int) -> str:
        """Return the speaker of a row of ``voices``: the name of the group ``speaker``, with ``_2`` for a second voice.

        Underscores are appended to a numbered name while a group of the manifest already has it.
        """
        number = int(self.voices["number"][voice])
        name = tagged_speaker(self.first_of(int(self.voices["speaker"][voice])).speaker)
        if number > 1:
            name += f"_{number}"
            while hash_group(name)[0] in self._groups:
                name += "_"
        return name

    def describe_groups(self) -> Iterator[dict[str, Any]]:
        """Yield a finding for each group that has several voices, and for each voice that several groups have."""
        voices, by_voice = self.voices, defaultdict[int, list[int]](list)
        for row in np.flatnonzero(voices["is_main"]).tolist():
            by_voice[int(voices["voice"][row])].append(row)

        def elsewhere(row: int) -> bool:
            """Return True if a voice is also a main voice of another group: its clips have a wrong label."""
            same = by_voice.get(int(voices["voice"][row]), [])
            return any(voices["group"][one] != voices["group"][row] for one in same)

        begins = np.flatnonzero(np.diff(voices["group"].astype(np.int64), prepend=-1))
        for begin, end in pairwise([*begins.tolist(), len(voices)]):
            group = int(voices["group"][begin])
            rows = [row for row in range(begin, end) if voices["is_main"][row] or not elsewhere(row)]
            similarity = self._lowest_similarity(rows)
            if similarity < self._least:
                largest = sorted(rows, key=lambda row: -int(voices["size"][row]))[:_MOST_LISTED]
                listed = [
                    {"clips": int(voices["size"][row]), "example": self._example(int(voices["cluster"][row]))}
                    for row in largest
                ]
                yield {
                    "finding": "several_voices", "group": self.group_of(group), "similarity": similarity,
                    "num_voices": len(rows), "voices": listed,
                }  # fmt: skip
        for rows in by_voice.values():
            groups = list(dict.fromkeys(voices["group"][rows].tolist()))
            if len(groups) > 1:
                yield {
                    "finding": "one_voice", "groups": [self.group_of(group) for group in groups],
                    "similarity": self._lowest_similarity(rows),
                }  # fmt: skip

    def _lowest_similarity(self, rows: list[int]) -> float:
        """Return the lowest mean similarity between the clips of two of these voices; 1 for a single voice."""
        means = self.directions[rows].astype(np.float64) * self.voices["length"][rows][:, None]
        return round(find_lowest_similarity(means), 4)

    def _example(self, line: int) -> str:
        segment = self.first_of(line).segment
        return f"{segment.audio_filepath} at {segment.offset:g} s"


def find_lowest_similarity(means: np.ndarray) -> float:
    """Return the lowest dot product of two of these rows (N, D); 1 if there are fewer than two rows."""
    lowest, step = 1.0, max(1, _BLOCK // max(1, len(means)))
    for start in range(0, len(means), step):
        similar = means[start : start + step] @ means[start:].T
        similar[np.tril_indices(len(similar))] = 1.0
        lowest = min(lowest, float(similar.min()))
    return lowest
