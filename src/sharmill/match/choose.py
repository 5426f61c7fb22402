"""Choice of contexts for the utterances of a speaker group, and checks of contexts given in the manifest.

An utterance without a suitable context is rejected with a reason.
"""

import math
import sys
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import xxhash

from sharmill.audio.files import probe
from sharmill.audio.roots import AudioRoots
from sharmill.errors import ConfigError, RejectRecord
from sharmill.manifest import CONTEXT_KEYS, Context, Segment, Utterance, recording_id, tagged_speaker
from sharmill.match.config import MatchConfig
from sharmill.match.embed import EmbeddedSegment, to_array
from sharmill.match.select import number_words, select_context
from sharmill.models import ModelFamily, find_speaker_encoder
from sharmill.stages.speaker_key import SpeakerKey

# For groups of up to this size, computing the similarities on the CPU is faster than launching GPU kernels.
_MAX_CPU_ROWS = 500
# A cosine similarity that a script computed in float32 may slightly exceed 1.
_TOLERANCE = 1e-3
# A limit in seconds that accepts any finite time.
_MAX_SECONDS = sys.float_info.max


@dataclass(frozen=True)
class ContextChooser:
    """Rules for choosing and checking the contexts of utterances.

    Args:
        match: configuration of the stage ``match``, which sets the limits of a context.
        roots: audio roots of the sources.
        speaker_key: derives the key of an utterance's group.
    """

    match: MatchConfig
    roots: AudioRoots
    speaker_key: SpeakerKey

    def group_key(self, utterance: Utterance) -> str:
        """Return the key of an utterance's speaker group."""
        return self.speaker_key(utterance.segment.audio_filepath, tagged_speaker(utterance.speaker))

    @cached_property
    def _least_similarity(self) -> float:
        return min_similarity(self.match)

    def may_match(self, group: list[Utterance]) -> bool:
        """Return True if the size and the durations of a group allow at least one context.

        Otherwise the group need not be embedded.
        """
        return len(group) > 1 and any(self.long_enough(utterance.segment.duration) for utterance in group)

    def long_enough(self, duration: float) -> bool:
        """Return True if the duration in seconds is within the limits for a context."""
        longest = self.match.max_duration
        return duration >= self.match.min_duration and (longest is None or duration <= longest)

    def choose(self, group: list[Utterance], segments: list[EmbeddedSegment]) -> list[Utterance | RejectRecord]:
        """Return each utterance of a group with its context, or a RejectRecord with the reason why it has none.

        Args:
            segments: embedded segments of the utterances, in the same order.
        """
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
            "durations": np.array([utterance.segment.duration for utterance in group]),
            # A file always has the same number, even if it is named through different links or roots.
            "recordings": _number_values([self._recording(utterance) for utterance in group]),
            "offsets": np.array([utterance.segment.offset for utterance in group]),
        }
        if match.exclude_same_text:
            # Texts are compared regardless of case and spacing; -1 stands for no text.
            problem["texts"] = _number_values((" ".join(said.text.lower().split()) for said in group), {"": -1})
        if match.max_text_overlap is not None:
            problem["words"] = np.fromiter(number_words(said.text for said in group), dtype=object)
            options["max_text_overlap"] = match.max_text_overlap
        if match.max_speaker_items is not None:
            problem["candidates"] = self._draw_pool(group, options["seed"])
        if match.max_other_similarity is not None:
            is_own = [not segment.other > min(segment.own, match.max_other_similarity) for segment in segments]
            problem["candidates"] = problem.get("candidates", True) & np.array(is_own)
        contents = _number_values([segment.content for segment in segments])
        chosen = select_context(**problem, contents=contents, max_similarity=match.max_similarity, **options)
        index, similarity = map(np.asarray, chosen)
        copies = self._find_copies(problem, contents, options, np.flatnonzero(index < 0))
        outcomes: list[Utterance | RejectRecord] = []
        for row, utterance in enumerate(group):
            if index[row] >= 0:
                found = group[index[row]]
                context = Context(
                    segment=found.segment,
                    recording_id=found.recording_id,
                    text=found.text,
                    similarity=round(float(similarity[row]), 6),
                    normalized_text=found.custom.get("normalized_text"),
                )
                outcomes.append(_with_context(utterance, context))
            else:
                copy = (group[copies[row][0]], copies[row][1]) if row in copies else None
                outcomes.append(self._no_context(float(similarity[row]), copy))
        return outcomes

    def _recording(self, utterance: Utterance) -> str:
        """Return a unique name for the original file of a record or a candidate."""
        segment, (*sources, dataset) = utterance.segment, self.roots.roots
        is_stored = segment.member is not None or self.roots.roots[segment.root] is dataset
        if not (self.match.contexts_from_dataset and is_stored):
            return self.roots.real_name(segment)
        # Audio in a container or in the dataset is identified by the name of its original file.
        name = segment.audio_filepath
        return next((root.name_of(name) for root in sources if root.has(name)), name)

    def _draw_pool(self, group: list[Utterance], seed: int) -> np.ndarray:
        """Return a random mask (N,) of at most ``max_speaker_items`` utterances with permitted durations."""
        long_enough = np.flatnonzero([self.long_enough(utterance.segment.duration) for utterance in group])
        size = min(len(long_enough), self.match.max_speaker_items or len(group))
        pool = np.zeros(len(group), dtype=bool)
        pool[np.random.default_rng(seed).permutation(long_enough)[:size]] = True
        return pool

    def _find_copies(
        self, problem: dict[str, Any], contents: np.ndarray, options: dict[str, Any], rows: np.ndarray
    ) -> dict[int, tuple[int, float]]:
        """Find copies that would be chosen as contexts for ``rows`` if copies were not excluded.

        Args:
            problem, options: arguments of ``select_context``, by name.
            contents: (N,) ids of the samples; copies have the same id.
            rows: indices of the utterances without a context.

        Returns:
            The index and similarity of the copy for each row that has one, keyed by row.
        """
        if self.match.max_similarity is None:
            # If max_similarity is not set, only utterances with the same samples count as copies, so few utterances
            # need to be searched.
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

    def _no_context(self, best_similarity: float, copy: tuple[Utterance, float] | None) -> RejectRecord:
        """Return a RejectRecord with the reason why an utterance has no context.

        Args:
            best_similarity: similarity of the best candidate; -inf if there is no candidate.
            copy: the copy that would have been chosen if copies were not excluded, and its similarity.
        """
        if copy is not None:
            segment = copy[0].segment
            return RejectRecord(
                "only_copies",
                f"all candidates are copies: {segment.audio_filepath} at {segment.offset:g} s has the same samples "
                f"or a similarity above match.max_similarity ({copy[1]:.4f})",
            )
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

    def read_given(self, utterances: Sequence[Utterance]) -> dict[int, Context | RejectRecord]:
        """Return the contexts given in the records, keyed by record number; a RejectRecord replaces an unusable
        context.

        Missing keys of a context are filled in, except the similarity, which becomes NaN and is computed by ``keep``.

        Args:
            utterances: utterances of a unit. If a given context is one of them, its location, its ids and any missing
                texts are taken from that utterance. Any other context must be a file below the audio root of its
                record.
        """
        known = {_segment_key(one.segment): one for one in utterances}
        found: dict[int, Context | RejectRecord] = {}
        for one in utterances:
            if one.custom.get("context_audio_filepath") is not None:
                try:
                    found[one.index] = self._read_given(one, known)
                except RejectRecord as reject:
                    found[one.index] = _bad_context(reject)
        return found

    def _read_given(self, utterance: Utterance, others: Mapping[Hashable, Utterance]) -> Context:
        record = utterance.custom
        path = record["context_audio_filepath"]
        if not isinstance(path, str) or not path.strip():
            raise RejectRecord("malformed", f"context_audio_filepath is {str(path)[:40]!r}")
        offset = _read_number(record, "context_audio_offset", 0.0, _MAX_SECONDS)
        duration = _read_number(record, "context_audio_duration", 0.0, _MAX_SECONDS)
        similarity = _read_number(record, "context_speaker_similarity", -1 - _TOLERANCE, 1 + _TOLERANCE)
        texts = {key: record.get(key) for key in ("context_audio_text", "context_audio_normalized_text")}
        for key, text in texts.items():
            if not isinstance(text, str | None):
                raise RejectRecord("malformed", f"{key} is {str(text)[:40]!r}")
        source = next(n for n, numbers in enumerate(self.roots.numbers) if utterance.segment.root in numbers)
        root, relative = self.roots.place(source, path)
        segment = Segment(root, relative, offset or 0.0, duration or 0.0, whole_file=offset is None)
        if duration is None:
            info = probe(self.roots.locate(segment))
            seconds = info.num_samples / info.sampling_rate - segment.offset
            if seconds <= 0:
                raise RejectRecord("duration_mismatch", f"it starts at {segment.offset:g} s, after the end of its file")
            segment = replace(segment, duration=seconds)
        known = others.get(_segment_key(segment))
        if known is not None:
            segment = known.segment
        text, normalized = texts.values()
        return Context(
            segment=segment,
            recording_id=known.recording_id if known else recording_id(segment.audio_filepath),
            text=text if text is not None else known.text if known else "",
            similarity=math.nan if similarity is None else min(1.0, max(-1.0, similarity)),
            normalized_text=normalized or (known.custom.get("normalized_text") if known else None),
        )

    def keep(
        self, utterance: Utterance, given: Context | RejectRecord, found: dict[Segment, EmbeddedSegment | RejectRecord]
    ) -> Utterance | RejectRecord:
        """Return an utterance with the context given in its record, or a RejectRecord if the context cannot be used.

        Args:
            given: result of ``read_given`` for the utterance.
            found: for each segment, its embedding or the reason why it has none.
        """
        if isinstance(given, RejectRecord):
            return given
        own, voice, segment = found[utterance.segment], found[given.segment], given.segment
        assert isinstance(own, EmbeddedSegment)
        if isinstance(voice, RejectRecord):
            return _bad_context(voice)
        overlaps = (
            utterance.segment.offset < segment.offset + segment.duration - 1e-6
            and segment.offset < utterance.segment.offset + utterance.segment.duration - 1e-6
        )
        similarity = given.similarity
        if math.isnan(similarity):
            similarity = round(float(np.dot(*(to_array(one.embedding).astype(np.float64) for one in (own, voice)))), 6)
        if overlaps and self.roots.real_name(utterance.segment) == self.roots.real_name(segment):
            problem = "is the utterance itself or overlaps it"
        elif own.content == voice.content:
            problem = "has the same samples as the utterance"
        elif not self.long_enough(segment.duration):
            problem = f"does not have {self._limits()}"
        elif similarity < self._least_similarity:
            limit = f"{self._least_similarity:g} (match.min_similarity)"
            problem = f"has a similarity of {similarity:.4f}, below {limit}"
        else:
            segment = replace(segment, notes=voice.notes)
            return _with_context(utterance, replace(given, similarity=similarity, segment=segment))
        return RejectRecord("bad_context", f"the context given in the record {problem}")


def encoder_family(match: MatchConfig) -> ModelFamily:
    """Return the family of the configured speaker encoder, without loading the encoder."""
    return find_speaker_encoder(match.encoder, **match.options)


def min_similarity(match: MatchConfig) -> float:
    """Return the minimum similarity of a context, from the configuration or the speaker encoder's default.

    Raises:
        ConfigError: neither the configuration nor the encoder has a value.
    """
    own = match.min_similarity if match.min_similarity is not None else encoder_family(match).min_similarity
    if own is None:
        raise ConfigError(
            f"the speaker encoder {match.encoder!r} has no default min_similarity: set match.min_similarity, for "
            "example to 0.6, which is usual for TitaNet",
            code="missing_key",
        )
    return own


def _number_values(values: Iterable[Hashable], numbers: dict[Any, int] | None = None) -> np.ndarray:
    """Return an integer id for each value, int64 (N,); equal values get the same id.

    Args:
        numbers: ids assigned in advance, by value; new ids begin at the size of this dict.
    """
    numbers = {} if numbers is None else numbers
    return np.array([numbers.setdefault(value, len(numbers)) for value in values], dtype=np.int64)


def _stack(rows: list[Any]) -> Any:
    """Stack embeddings into an array (N, D) or, for a large group on a GPU, into a tensor on that GPU."""
    # Stored embeddings are arrays, even if the other embeddings are tensors.
    if any(isinstance(row, np.ndarray) for row in rows):
        return np.stack([to_array(row) for row in rows])
    import torch

    stacked = torch.stack(rows)
    return stacked if len(rows) > _MAX_CPU_ROWS else stacked.cpu().numpy()


def _with_context(utterance: Utterance, context: Context) -> Utterance:
    """Return the utterance with this context, but without the context keys of its record."""
    custom = {key: value for key, value in utterance.custom.items() if key not in CONTEXT_KEYS}
    return replace(utterance, custom=custom, context=context)


def _bad_context(reject: RejectRecord) -> RejectRecord:
    """Return a RejectRecord for a record whose given context is unusable for the reason in ``reject``."""
    return RejectRecord("bad_context", f"the context given in the record: {reject.reason}: {reject.detail}")


def _segment_key(segment: Segment) -> Hashable:
    # Times in manifests are rounded, so times are compared to the millisecond.
    return segment.root, segment.audio_filepath, round(segment.offset, 3), round(segment.duration, 3)


def _read_number(record: Mapping[str, Any], key: str, least: float, most: float) -> float | None:
    value = record.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not least <= value <= most:
        raise RejectRecord("malformed", f"{key} is {str(value)[:40]!r}")
    return float(value)
