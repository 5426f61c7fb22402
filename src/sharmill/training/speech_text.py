"""Batches of speech, text and conversations as sequences of text tokens and frames, for speech language models.

The docstring of ``SpeechTextDataset`` lists the entries of a batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from sharmill.errors import ConfigError
from sharmill.files.storage import checksum_bytes
from sharmill.shar.layout import CONTEXT_CODES, CONTEXT_UNALIGNED, TARGET_AUDIO, TARGET_CODES
from sharmill.training.codes import CodecForm, ContextDraws, load_target, mark_codes
from sharmill.training.cut_data import holds, load_array, load_audio, text_of
from sharmill.training.dataset import Batch
from sharmill.training.tokenizers import Tokenizers, check_tokenizers, tokenize

if TYPE_CHECKING:
    from lhotse import CutSet, MonoCut


class Kind(IntEnum):
    """Content of a position."""

    PADDING = 0
    TEXT = 1
    CODES = 2
    AUDIO = 3


@dataclass(frozen=True)
class Span:
    """Positions of one kind that follow each other.

    ``values`` are token ids (positions,), codes (codebooks, positions) or samples (positions, samples of a frame);
    ``predicted`` (positions,) is true for those that a model learns to predict from what comes before them.
    """

    kind: Kind
    values: np.ndarray
    predicted: np.ndarray


class SpeechTextDataset(torch.utils.data.Dataset[Batch]):
    """A maker of batches of any mixture of utterances, texts, pairs of texts, and conversations.

    Each example becomes one sequence, in which a position is a token of text or a frame of speech:

    * an utterance (a cut): its text, if it has one, a slice of its context, and the target, whose codes are predicted;
    * a text, a pair or a chat: its tokens, of which those of the assistant are predicted; of a text alone, all;
    * a conversation: the tokens of its turns, with the frames of each audio turn in the place of its locator. Where a
      cut has codes, the turn goes in as codes; otherwise the user's goes in as audio, for a model that hears.

    A batch of B examples, of which the longest has P positions, has these entries. Every batch has all of them, be
    there text alone or speech alone in it.

    ================= ===================== ====================================================================
    entry             type, shape           content
    ================= ===================== ====================================================================
    ``ids``           list of B             of the cut or conversation; of text, a checksum of it
    ``tags``          list of B             dicts of those ``tags`` of the loader's entry that an example has
    ``lengths``       int64 (B,)            positions, without padding, which is at the end
    ``kinds``         int64 (B, P)          ``Kind``: 0 padding, 1 text, 2 codes, 3 audio
    ``spans``         int64 (B, P)          0 for the first stretch of one kind, 1 for the next: a text, a context, …
    ``predicted``     bool (B, P)           true where a model learns to predict the position from those before it
    ``text_tokens``   int64 (B, P)          token ids where ``kinds`` is 1, otherwise 0
    ``codes``         int64 (B, C, P)       codes where ``kinds`` is 2, BOS and EOS around each stretch; otherwise 0
    ``audio``         float32 (A, S)        the samples of each frame where ``kinds`` is 3, row by row of the batch
    ================= ===================== ====================================================================

    So ``hidden[batch["kinds"] == Kind.AUDIO] = embed(batch["audio"])``, and likewise for the others.

    Text is taken as the loader made it with its ``prompt_format`` (``input_ids``, and ``mask`` for what is predicted),
    which gives every group of tags its prompt, by the tag ``context``. Without a prompt format there are utterances
    alone, and the tokens are those of ``tokenizer``, all of which are predicted.

    The slice of a context is that of a ``ContextSpeechDataset`` with the same seed.

    Args:
        codec: the form of codes, and of the frames of audio: ``CodecForm.of_dataset("data/librispeech")``.
        tokenizer: the one that the loader has: a function from text to ids, or one of NeMo (``text_to_ids``). The
            locator of audio turns should be a special token of it.
        context: False for data without contexts, or to leave them out.
        context_duration_min, context_duration_max: seconds; see ``ContextSpeechDataset``.
        tags: names of tags that the entries of ``input_cfg`` give their data.
        text_bos_id, text_eos_id: added around the text of an utterance that came without a prompt format.
        seed: of the slices of contexts.

    Raises:
        ConfigError: the codec's form lacks the number of codebooks.
        ValueError: limits do not go together.

    Example:
        >>> dataset = SpeechTextDataset(CodecForm.of_dataset("data/libritts"), tokenizer)  # doctest: +SKIP
        >>> loader = get_dataloader(settings, 0, 1, tokenizer, dataset=dataset)  # doctest: +SKIP
        >>> batch = next(iter(loader))  # doctest: +SKIP
        >>> batch["text_tokens"].shape, batch["codes"].shape  # doctest: +SKIP
        (torch.Size([8, 412]), torch.Size([8, 4, 412]))
    """

    def __init__(
        self,
        codec: CodecForm,
        tokenizer: Tokenizers,
        *,
        context: bool = True,
        context_duration_min: float = 3.0,
        context_duration_max: float = 10.0,
        tags: Sequence[str] = (),
        text_bos_id: int | None = None,
        text_eos_id: int | None = None,
        seed: int = 0,
    ) -> None:
        if codec.num_codebooks is None:
            raise ConfigError(
                "the CodecForm has no num_codebooks, which a batch of text alone needs as well", code="bad_codec"
            )
        self.codec = codec
        self.num_codebooks = codec.num_codebooks
        self.tokenizer: Tokenizers = getattr(tokenizer, "text_to_ids", tokenizer)
        check_tokenizers(self.tokenizer)
        self.context = context
        self.tags = tuple(tags)
        self.text_marks = [[] if mark is None else [mark] for mark in (text_bos_id, text_eos_id)]
        self._draws = ContextDraws(context_duration_min, context_duration_max, seed)

    def set_epoch(self, epoch: int) -> None:
        """Draw other slices from the next batch on; to be called before a loader begins an epoch."""
        self._draws.set_epoch(epoch)

    def __getitem__(self, examples: CutSet) -> Batch:
        """Return the batch of these examples.

        Raises:
            ConfigError: the loader's settings, or the fields of the dataset, do not give what the batch needs.
            ValueError: an example is not what a sequence can be made of; the message names it.
        """
        batch_examples = list(examples)
        if not batch_examples:
            raise ValueError("a batch without examples")
        sequences = [self.spans_of(example) for example in batch_examples]
        customs = [example.custom or {} for example in batch_examples]
        batch = self._tensors(sequences)
        batch["ids"] = [_id_of(example) for example in batch_examples]
        batch["tags"] = [{name: custom[name] for name in self.tags if name in custom} for custom in customs]
        return batch

    def spans_of(self, example: Any) -> list[Span]:
        """Return the sequence of one example, span by span."""
        from lhotse.cut import Cut

        if isinstance(example, Cut):
            return [span for span in self._utterance(example) if len(span.predicted)]
        if getattr(example, "input_ids", None) is None:
            raise ConfigError(
                f"{_id_of(example)!r} came without input_ids: set prompt_format in the loader's settings, which may be "
                "plain",
                code="missing_key",
            )
        return list(self._conversation(example))

    def _utterance(self, cut: MonoCut) -> Iterator[Span]:
        """Yield text, context and target of a cut."""
        _require_one_supervision(cut)
        if getattr(cut, "input_ids", None) is not None:
            yield Span(Kind.TEXT, *_prompted(cut))
        else:
            text = text_of(cut, "text") or ""
            ids = tokenize(self.tokenizer, text, cut.supervisions[0].language, cut.id)
            bos, eos = self.text_marks
            tokens = np.array([*bos, *ids, *eos], dtype=np.int64)
            yield Span(Kind.TEXT, tokens, np.ones(len(tokens), dtype=bool))
        if self.context:
            if not holds(cut, CONTEXT_CODES):
                raise ConfigError(
                    f"cut {cut.id!r} has no {CONTEXT_CODES}: name them in fields, encode the dataset, or make the "
                    "SpeechTextDataset with context=False for data without contexts",
                    code="unknown_field",
                )
            codes = load_array(cut, CONTEXT_CODES)
            part = self._draws.draw(cut, codes.shape[-1], self.codec.frame_shift)
            marked = mark_codes(part.of_frames(codes), self.codec, self.codec.context_marks, cut)
            yield self._codes_span(marked, cut, predicted=False)
        if not holds(cut, TARGET_CODES):
            raise ConfigError(
                f"cut {cut.id!r} has no {TARGET_CODES}: name them in fields, or encode the dataset",
                code="unknown_field",
            )
        yield self._codes_span(load_target(cut, self.codec), cut, predicted=True)

    def _conversation(self, example: Any) -> Iterator[Span]:
        """Yield the tokens of a text or of turns, and in the place of each locator the frames of its audio turn."""
        tokens, predicted = _prompted(example)
        turns = [turn for turn in getattr(example, "turns", ()) if hasattr(turn, "cut")]
        begin = 0
        for turn, (first, last) in zip(turns, self._locators(tokens, turns, example), strict=True):
            if first > begin:
                yield Span(Kind.TEXT, tokens[begin:first], predicted[begin:first])
            yield self._audio_turn(turn.cut, bool(predicted[first]), example)
            begin = last
        if begin < len(tokens):
            yield Span(Kind.TEXT, tokens[begin:], predicted[begin:])

    def _locators(self, tokens: np.ndarray, turns: list[Any], example: Any) -> list[tuple[int, int]]:
        """Return where the locator of each audio turn begins and ends in the tokens."""
        places: list[tuple[int, int]] = []
        if turns:
            ids = tokenize(self.tokenizer, turns[0].audio_locator_tag, None, _id_of(example))
            firsts = range(len(tokens) - len(ids) + 1)
            places = [(first, first + len(ids)) for first in firsts if tokens[first : first + len(ids)].tolist() == ids]
        if len(places) != len(turns):
            tag = turns[0].audio_locator_tag
            texts = [turn for turn in example.turns if tag in str(getattr(turn, "value", ""))]
            told = (
                f"a text turn of {texts[0].role} with {tag!r} in it, which stands for audio: take it out of the text, "
                "or set an audio_locator_tag that no text has"
                if texts
                else f"{len(turns)} audio turns and {len(places)} times the tokens of {tag!r}: make the "
                "audio_locator_tag a special token of the tokenizer"
            )
            raise ConfigError(f"conversation {_id_of(example)!r} has {told}", code="bad_config_value")
        return places

    def _audio_turn(self, cut: MonoCut, predicted: bool, example: Any) -> Span:
        """Return the frames of an audio turn: its codes, or else its samples, which cannot be predicted."""
        if holds(cut, TARGET_CODES):
            return self._codes_span(load_target(cut, self.codec), cut, predicted=predicted)
        if predicted:
            raise ConfigError(
                f"an audio turn of the assistant in conversation {_id_of(example)!r} has no {TARGET_CODES}, and audio "
                "cannot be predicted: make it of a dataset with codes, or leave it out",
                code="unknown_field",
            )
        samples = _samples_of(cut, self.codec.sampling_rate)
        size = self.codec.samples_per_frame
        frames = np.pad(samples, (0, -len(samples) % size)).reshape(-1, size)
        return Span(Kind.AUDIO, frames, np.zeros(len(frames), dtype=bool))

    def _codes_span(self, marked: np.ndarray, cut: MonoCut, *, predicted: bool) -> Span:
        if len(marked) != self.num_codebooks:
            raise ConfigError(
                f"the codes of cut {cut.id!r} have {len(marked)} codebooks, and the codec has {self.num_codebooks}",
                code="bad_codec",
            )
        mask = np.full(marked.shape[1], predicted)
        # What begins the codes is given, as it is when a model is used.
        mask[: int(self.codec.marks)] = False
        return Span(Kind.CODES, marked, mask)

    def _tensors(self, sequences: list[list[Span]]) -> Batch:
        """Return the tensors of a batch of sequences."""
        lengths = [sum(len(span.predicted) for span in spans) for spans in sequences]
        shape = (len(sequences), max(lengths))
        kinds, numbers, tokens = (np.zeros(shape, dtype=np.int64) for _ in range(3))
        predicted = np.zeros(shape, dtype=bool)
        codes = np.zeros((shape[0], self.num_codebooks, shape[1]), dtype=np.int64)
        audio = [np.zeros((0, self.codec.samples_per_frame), dtype=np.float32)]
        for row, spans in enumerate(sequences):
            begin = 0
            for number, span in enumerate(spans):
                place = slice(begin, begin + len(span.predicted))
                kinds[row, place], numbers[row, place], predicted[row, place] = span.kind, number, span.predicted
                if span.kind == Kind.TEXT:
                    tokens[row, place] = span.values
                elif span.kind == Kind.CODES:
                    codes[row, :, place] = span.values
                else:
                    audio.append(span.values)
                begin = place.stop
        # Nothing comes before the first position.
        predicted[:, :1] = False
        arrays = {"lengths": np.array(lengths), "kinds": kinds, "spans": numbers, "predicted": predicted}
        arrays |= {"text_tokens": tokens, "codes": codes, "audio": np.concatenate(audio)}
        return {name: torch.from_numpy(array) for name, array in arrays.items()}


def _id_of(example: Any) -> str:
    """Return the id of an example; text has none, and gets one made from it."""
    if (found := getattr(example, "id", None)) is not None:
        return str(found)
    parts = [example.source, example.target] if hasattr(example, "source") else [example]
    text = "\n".join(getattr(part, "text", None) or repr(getattr(part, "data", "")) for part in parts)
    return f"text-{checksum_bytes(text.encode())}"


def _require_one_supervision(cut: Any) -> None:
    from lhotse import MonoCut

    if not isinstance(cut, MonoCut):
        raise ValueError(f"cut {cut.id!r} is a {type(cut).__name__}; sequences are made of MonoCuts, without padding")
    if len(cut.supervisions) != 1:
        raise ValueError(f"cut {cut.id!r} has {len(cut.supervisions)} supervisions instead of one")


def _prompted(example: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return the tokens that the loader's prompt format made, and which of them are predicted.

    None is where the last turn is not the assistant's, as at inference.
    """
    tokens = np.asarray(example.input_ids, dtype=np.int64)
    mask = getattr(example, "mask", None)
    return tokens, np.zeros(len(tokens), dtype=bool) if mask is None else np.asarray(mask, dtype=bool)


def _samples_of(cut: MonoCut, sampling_rate: int) -> np.ndarray:
    """Return the audio of a turn, (time,): of a cut of ours what was read of it, of another cut its file."""
    if holds(cut, TARGET_AUDIO):
        return load_audio(cut, TARGET_AUDIO, sampling_rate)
    if CONTEXT_UNALIGNED in (cut.custom or {}):
        raise ValueError(
            f"cut {cut.id!r} of a conversation has neither {TARGET_CODES} nor {TARGET_AUDIO}: name one in fields"
        )
    samples = cut.resample(sampling_rate).load_audio()
    if len(samples) != 1:
        raise ValueError(f"the audio of cut {cut.id!r} has {len(samples)} channels; mono is needed")
    mono: np.ndarray = samples[0].astype(np.float32, copy=False)
    return mono
