"""The context of every utterance of a speaker group, or why it has none, by the configuration of the stage."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import xxhash

from sharmill.audio.roots import AudioRoots
from sharmill.errors import ConfigError, RejectRecord
from sharmill.manifest import CONTEXT_KEYS, Context, Segment, Utterance
from sharmill.match.candidates import origin_of
from sharmill.match.config import MatchConfig
from sharmill.match.embed import EmbeddedSegment
from sharmill.match.given import GivenContext, check_given
from sharmill.match.select import select_context
from sharmill.match.words import number_words
from sharmill.models import ModelFamily, find_speaker_encoder

# Of a smaller group the similarities take less time on the CPU than their kernels take to start.
_FEW_ROWS = 500


@dataclass(frozen=True)
class ContextChooser:
    """The rule by which utterances get their contexts.

    Args:
        match: the limits.
        roots: the audio roots of the sources.
        group_key: returns the key of an utterance's group.
    """

    match: MatchConfig
    roots: AudioRoots
    group_key: Callable[[Utterance], str]

    @cached_property
    def _least_similarity(self) -> float:
        return min_similarity(self.match)

    def may_match(self, group: list[Utterance]) -> bool:
        """Return False where the durations rule out every context; there is no need to embed the group then."""
        return len(group) > 1 and any(self.long_enough(utterance.duration) for utterance in group)

    def long_enough(self, duration: float) -> bool:
        """Return True if an utterance of so many seconds may be a context."""
        longest = self.match.max_duration
        return duration >= self.match.min_duration and (longest is None or duration <= longest)

    def choose(self, group: list[Utterance], segments: list[EmbeddedSegment]) -> list[Utterance | RejectRecord]:
        """Return each utterance of a group with its context, or why it has none; ``segments`` are of the group."""
        if len(group) < 2:
            detail = "the group {!r} has no other usable utterance"
            return [RejectRecord("single_utterance_speaker", detail.format(self.group_key(one))) for one in group]
        if not self.may_match(group):
            detail = f"no utterance of its group has {self._limits()}"
            return [RejectRecord("no_long_context", detail) for _ in group]
        match = self.match
        options: dict[str, Any] = {
            "min_similarity": self._least_similarity,
            "min_duration": match.min_duration,
            "max_duration": match.max_duration,
            "choice": match.choice,
            "sample_size": match.sample_size,
            "seed": xxhash.xxh3_64_intdigest(f"{match.seed}\n{group[0].cut_id}".encode()),
        }
        problem: dict[str, Any] = {
            "embeddings": _stack([segment.embedding for segment in segments]),
            "durations": np.array([utterance.duration for utterance in group]),
            # Equal for the same file, by whatever links and roots it is named.
            "recordings": _number([self._recording(utterance) for utterance in group]),
            "offsets": np.array([utterance.offset for utterance in group]),
        }
        if match.exclude_same_text:
            # Equal for equal texts, case and spacing aside; -1 for an utterance without text.
            problem["texts"] = _number((" ".join(said.text.lower().split()) for said in group), {"": -1})
        if match.max_text_overlap is not None:
            problem["words"] = np.fromiter(number_words(said.text for said in group), dtype=object)
            options["max_text_overlap"] = match.max_text_overlap
        if match.max_speaker_items is not None:
            problem["candidates"] = self._draw_pool(group, options["seed"])
        contents = _number([segment.content for segment in segments])
        chosen = select_context(**problem, contents=contents, max_similarity=match.max_similarity, **options)
        index, similarity = map(np.asarray, chosen)
        copies = self._find_copies(problem, contents, options, np.flatnonzero(index < 0))
        outcomes: list[Utterance | RejectRecord] = []
        for row, utterance in enumerate(group):
            if index[row] >= 0:
                outcomes.append(_with_context(utterance, _as_context(group[index[row]], float(similarity[row]))))
            elif row in copies:
                outcomes.append(_only_copies(group[copies[row][0]], copies[row][1]))
            else:
                outcomes.append(self._no_context(float(similarity[row])))
        return outcomes

    def _recording(self, utterance: Utterance) -> str:
        """Return a name of the file that an utterance was taken from."""
        if self.match.contexts_from_dataset:
            return origin_of(utterance, self.roots)
        return self.roots.real_name(utterance.segment)

    def _draw_pool(self, group: list[Utterance], seed: int) -> np.ndarray:
        """Return which utterances of a group may be contexts (N,): so many as ``max_speaker_items``, or all."""
        long_enough = np.flatnonzero([self.long_enough(utterance.duration) for utterance in group])
        size = min(len(long_enough), self.match.max_speaker_items or len(group))
        pool = np.zeros(len(group), dtype=bool)
        pool[np.random.default_rng(seed).permutation(long_enough)[:size]] = True
        return pool

    def _find_copies(
        self, problem: dict[str, Any], contents: np.ndarray, options: dict[str, Any], rows: np.ndarray
    ) -> dict[int, tuple[int, float]]:
        """Return the copy that would be the context, and its similarity, for those of ``rows`` that have one."""
        if self.match.max_similarity is None:
            # All that could be found are utterances with the samples of one of these rows: few, if any.
            repeated = np.bincount(contents) > 1
            rows = rows[repeated[contents[rows]]]
            chosen = np.flatnonzero(np.isin(contents, contents[rows]))
        else:
            chosen = np.arange(len(contents))
        if not len(rows):
            return {}
        index, similarity = select_context(**{name: values[chosen] for name, values in problem.items()}, **options)
        of_rows = np.searchsorted(chosen, rows)
        return {
            int(row): (int(chosen[index[at]]), float(similarity[at]))
            for row, at in zip(rows, of_rows, strict=True)
            if index[at] >= 0
        }

    def _no_context(self, best_similarity: float) -> RejectRecord:
        if best_similarity == -np.inf:
            return RejectRecord("no_long_context", f"no other utterance of its group has {self._limits()}")
        return RejectRecord(
            "no_similar_context",
            f"the best candidate has a similarity of {best_similarity:.4f}, below {self._least_similarity:g} "
            "(match.min_similarity)",
        )

    def _limits(self) -> str:
        match = self.match
        longest = "" if match.max_duration is None else f" and at most {match.max_duration:g} s (match.max_duration)"
        return f"at least {match.min_duration:g} s (match.min_duration){longest} and satisfies the other limits"

    def keep(
        self,
        utterance: Utterance,
        given: GivenContext | RejectRecord,
        found: dict[Segment, EmbeddedSegment | RejectRecord],
    ) -> Utterance | RejectRecord:
        """Return an utterance with the context that it brings, or why that cannot be used."""
        if isinstance(given, RejectRecord):
            return given
        own = found[utterance.segment]
        assert isinstance(own, EmbeddedSegment)
        try:
            context = check_given(utterance, own, given, found[given.context.segment], self.roots)
        except RejectRecord as reject:
            return reject
        if not self.long_enough(context.segment.duration):
            return RejectRecord("bad_context", f"the context that the record brings does not have {self._limits()}")
        if context.similarity < self._least_similarity:
            limit = f"{self._least_similarity:g} (match.min_similarity)"
            detail = f"has a similarity of {context.similarity:.4f}, below {limit}"
            return RejectRecord("bad_context", f"the context that the record brings {detail}")
        return _with_context(utterance, context)


def encoder_family(match: MatchConfig) -> ModelFamily:
    """Return the speaker encoder, not loaded; the package that brings it may be imported."""
    return find_speaker_encoder(match.encoder, **match.options)


def min_similarity(match: MatchConfig) -> float:
    """Return the least similarity that a context must have: the configuration's, or else the speaker encoder's own.

    Raises:
        ConfigError: neither says one.
    """
    own = match.min_similarity if match.min_similarity is not None else encoder_family(match).min_similarity
    if own is None:
        raise ConfigError(
            f"the speaker encoder {match.encoder!r} brings no min_similarity of its own, since none was measured for "
            "it: set match.min_similarity, for example to 0.6 as is usual for TitaNet",
            code="missing_key",
        )
    return own


def _number(values: Iterable[Hashable], numbers: dict[Any, int] | None = None) -> np.ndarray:
    """Return equal numbers for equal values, from 0 on; ``numbers`` are those given already."""
    numbers = {} if numbers is None else numbers
    return np.array([numbers.setdefault(value, len(numbers)) for value in values], dtype=np.int64)


def _only_copies(copy: Utterance, similarity: float) -> RejectRecord:
    return RejectRecord(
        "only_copies",
        f"nothing else could be its context: {copy.audio_filepath} at {copy.offset:g} s has the same samples, or more "
        f"than max_similarity: {similarity:.4f}",
    )


def _stack(rows: list[Any]) -> Any:
    """Return embeddings as one array, or as a tensor on their device where the product is worth its kernels."""
    if isinstance(rows[0], np.ndarray):
        return np.stack(rows)
    import torch

    stacked = torch.stack(rows)
    return stacked if len(rows) > _FEW_ROWS else stacked.cpu().numpy()


def _as_context(context: Utterance, similarity: float) -> Context:
    return Context(
        segment=context.segment,
        recording_id=context.recording_id,
        text=context.text,
        similarity=round(similarity, 6),
        normalized_text=context.custom.get("normalized_text"),
    )


def _with_context(utterance: Utterance, context: Context) -> Utterance:
    """Return the utterance with its context; keys that a source had for one of its own go."""
    custom = {key: value for key, value in utterance.custom.items() if key not in CONTEXT_KEYS}
    return dataclasses.replace(utterance, custom=custom, context=context)
