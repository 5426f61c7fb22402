"""Batches of padded tensors for TTS and speech language models, built from the cuts or other examples of a sampler.

``ContextSpeechDataset`` accepts only cuts. ``SpeechTextDataset`` accepts any mixture of speech, text and conversations.
Their docstrings list the entries of a batch.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Literal

import numpy as np
import torch
from lhotse import CutSet, MonoCut
from lhotse.cut import Cut

from sharmill.errors import ConfigError, refuse
from sharmill.files.checksums import checksum_bytes
from sharmill.manifest import CONTEXT_KEYS
from sharmill.shar.fields import CONTEXT_AUDIO, CONTEXT_CODES, CONTEXT_UNALIGNED, TARGET_AUDIO, TARGET_CODES
from sharmill.training.codes import (
    CodecForm,
    ContextDraws,
    holds,
    load_audio,
    load_target,
    mono,
    recording_of,
    refuse_example,
    require_one_supervision,
    text_of,
    without_padding,
)
from sharmill.training.tokenizers import Tokenizers, check_tokenizers, tokenize

Batch = dict[str, torch.Tensor | list[Any]]

_16KHZ = 16000


class ContextSpeechDataset(torch.utils.data.Dataset[Batch]):
    """A dataset that turns cuts into batches of text tokens, targets and random slices of contexts.

    A batch of B cuts has these entries. Tensors are padded at the end, and the lengths exclude the padding.

    ============================ ===================== =========================================================
    entry                        type, shape           content
    ============================ ===================== =========================================================
    ``ids``                      list of B             cut ids
    ``text``, ``language``       lists of B            from the supervision; None if missing
    ``speaker``                  list of B             the speaker tag; None if missing
    ``tags``                     list of B             for each cut, a dict of the requested ``tags`` that it has;
                                                       only if ``tags`` are requested
    ``durations``                float32 (B,)          seconds of the target
    ``similarity``               float32 (B,)          speaker similarity of target and context; NaN if unknown
    ``text_tokens``              int64 (B, N)          padded with ``text_pad_id``; only with a ``tokenizer``
    ``text_lens``                int64 (B,)            number of tokens, including BOS and EOS
    ``target_codes``             int64 (B, C, T)       BOS, codes, EOS in every codebook; padded with ``code_pad_id``
    ``target_code_lens``         int64 (B,)            number of frames, including BOS and EOS
    ``context_codes``            int64 (B, C, T)       a slice of the context in the same form
    ``context_code_lens``        int64 (B,)            number of frames, including BOS and EOS
    ``context_durations``        float32 (B,)          seconds of the slice, without BOS and EOS
    ``target_audio``             float32 (B, L)        instead of ``target_codes`` if cuts have no codes. With a codec:
                                                       samples at its rate, padded with 0 to whole frames. Without:
                                                       samples at ``sampling_rate``, not padded to frames
    ``target_audio_lens``        int64 (B,)            number of samples without padding
    ``context_audio``            float32 (B, L)        instead of ``context_codes``; whole frames
    ``context_audio_lens``       int64 (B,)            number of samples without padding
    ``audio_16khz``              float32 (B, L)        only with ``audio_16khz``: the whole target, or the same seconds
                                                       as the slice of the context; padded with 0
    ``audio_16khz_lens``         int64 (B,)            number of samples without padding
    ============================ ===================== =========================================================

    Cuts may be truncated: the target is truncated with the cut, whereas the context stays whole. Cuts may be perturbed
    (speed, volume) only if the target is loaded as audio, because codes cannot be perturbed. Mixed cuts raise an error.

    Cuts may be padded at their end, for example by the loader's ``pad_min_duration: 30``. Lengths and ``durations``
    exclude this padding. The tensors of the target, and of the target's ``audio_16khz``, include it: they are as long
    as the longest padded cut.

    To predict the next frame, use ``target_codes[..., :-1]`` as input and ``target_codes[..., 1:]`` as labels.

    The slice of a context depends only on ``seed``, the epoch and the cut's id. It does not depend on the batch, the
    rank, the worker or earlier batches, so a resumed epoch has the same slices as an uninterrupted one. The epoch is
    the reader's epoch, if the cut records it (``shar_position``, ``shar_epoch``), combined with the last value given to
    ``set_epoch``.

    Args:
        codec: the form of the codes, such as ``CodecForm.of_dataset("data/librispeech")``. Audio is loaded at its
            sampling rate too. None for data without codes: batches then contain audio.
        tokenizer: a function from text to ids, or a mapping from languages to such functions; None for data without
            text.
        context: add contexts; use False for data without contexts.
        context_duration_min: minimum length of a slice in seconds; a shorter context is repeated from its beginning.
        context_duration_max: maximum length of a slice in seconds; a longer context is cut at a random place. See
            ``ContextDraws``.
        audio_16khz: ``target`` or ``context`` to add its audio at 16 kHz, for speaker models.
        tags: names of the tags to return, which distinguish groups within a batch. Entries of ``input_cfg`` set the
            tags of their cuts.
        text_field: ``text`` for the text of the supervision; any other name is looked up in its ``custom``.
        text_bos_id: added before the tokens if it is not None.
        text_eos_id: added after the tokens if it is not None.
        codes: False to load audio even if cuts have codes.
        sampling_rate: sampling rate of audio in Hz if ``codec`` is None. By default audio is not resampled, and all
            cuts of a batch must have the same rate.

    Raises:
        ValueError: the options contradict each other.

    Example:
        >>> dataset = ContextSpeechDataset(CodecForm.of_dataset("data/librispeech"))  # doctest: +SKIP
        >>> batch = dataset[CutSet.from_cuts(islice(open_shar("data/librispeech"), 8))]  # doctest: +SKIP
        >>> batch["target_codes"].shape  # doctest: +SKIP
        torch.Size([8, 8, 412])
    """

    def __init__(
        self,
        codec: CodecForm | None,
        tokenizer: Tokenizers | None = None,
        *,
        sampling_rate: int | None = None,
        context: bool = True,
        context_duration_min: float = 3.0,
        context_duration_max: float = 10.0,
        audio_16khz: Literal["target", "context"] | None = None,
        tags: Sequence[str] = (),
        text_field: str = "text",
        text_bos_id: int | None = None,
        text_eos_id: int | None = None,
        text_pad_id: int = 0,
        code_pad_id: int = 0,
        codes: bool = True,
        seed: int = 0,
    ) -> None:
        rate = sampling_rate if codec is None else codec.sampling_rate
        refuse_example(
            (audio_16khz == "context" and not context, "audio_16khz='context' needs contexts"),
            (sampling_rate not in (None, rate),
             f"sampling_rate differs from the codec's rate, {rate}: omit sampling_rate or the codec"),
        )  # fmt: skip
        if tokenizer is not None:
            check_tokenizers(tokenizer)
        self.codec = codec
        self.tokenizer = tokenizer
        self.sampling_rate = sampling_rate
        self._draws = ContextDraws(context_duration_min, context_duration_max, seed)
        self.context = context
        self.audio_16khz = audio_16khz
        self.tags = tuple(tags)
        self.text_field = text_field
        self.text_marks = (text_bos_id, text_eos_id)
        self.text_pad_id = text_pad_id
        self.code_pad_id = code_pad_id
        self.codes = codes and codec is not None

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch that determines the slices of the next batches; call this before a loader begins an epoch."""
        self._draws.epoch.fill_(epoch)

    def __getitem__(self, cuts: CutSet) -> Batch:
        """Return the batch of these cuts.

        Raises:
            ValueError: a cut lacks a field that the batch needs, or the form of a field differs between cuts.
        """
        unpadded = [without_padding(cut) for cut in cuts]
        refuse_example((not unpadded, "the batch has no cuts"))
        cuts_list = [cut for cut, _ in unpadded]
        for cut in cuts_list:
            require_one_supervision(cut)
        first = [cut.supervisions[0] for cut in cuts_list]
        similar = [(supervision.custom or {}).get("context_speaker_similarity") for supervision in first]
        similarity = [math.nan if one is None else float(one) for one in similar]
        batch: Batch = {
            "ids": [cut.id for cut in cuts_list],
            "text": [text_of(cut, self.text_field) for cut in cuts_list],
            "language": [supervision.language for supervision in first],
            "speaker": [supervision.speaker for supervision in first],
            "durations": torch.tensor([cut.duration for cut in cuts_list], dtype=torch.float32),
            "similarity": torch.tensor(similarity, dtype=torch.float32),
        }
        seconds = max(seconds for _, seconds in unpadded)
        if self.tags:
            batch["tags"] = _tags_of(cuts_list, self.tags)
        if self.tokenizer is not None:
            rows = [self._tokens(self.tokenizer, cut) for cut in cuts_list]
            batch |= _padded("text_tokens", "text_lens", rows, self.text_pad_id)
        batch |= self._targets(cuts_list, seconds)
        if self.context:
            batch |= self._contexts(cuts_list)
        if self.audio_16khz == "target":
            rows = [load_audio(cut, TARGET_AUDIO, _16KHZ) for cut in cuts_list]
            batch |= _padded("audio_16khz", "audio_16khz_lens", rows, at_least=round(seconds * _16KHZ))
        return batch

    def _tokens(self, tokenizer: Tokenizers, cut: MonoCut) -> np.ndarray:
        text = text_of(cut, self.text_field) or ""
        refuse_example(
            (not text, f"cut {cut.id!r} has no {self.text_field!r}: use tokenizer=None for data without text")
        )
        ids = tokenize(tokenizer, text, cut.supervisions[0].language, cut.id, self.text_marks)
        return np.array(ids, dtype=np.int64)

    def _targets(self, cuts: list[MonoCut], seconds: float) -> Batch:
        """Return the targets as tensors that are at least ``seconds`` long, with the lengths of the targets."""
        if (codec := self._codec_of(cuts, TARGET_CODES, TARGET_AUDIO)) is not None:
            rows = _same_codebooks([load_target(cut, codec) for cut in cuts], cuts)
            at_least = codec.num_frames(seconds) + 2 * codec.marks
            return _padded(TARGET_CODES, "target_code_lens", rows, self.code_pad_id, at_least=at_least)
        rate, per_frame = self._audio_form(cuts)
        samples = [load_audio(cut, TARGET_AUDIO, rate) for cut in cuts]
        return _padded(TARGET_AUDIO, "target_audio_lens", samples, multiple=per_frame, at_least=round(seconds * rate))

    def _contexts(self, cuts: list[MonoCut]) -> Batch:
        """Return a slice of each context and, if requested, 16 kHz audio of the same time span."""
        if (codec := self._codec_of(cuts, CONTEXT_CODES, CONTEXT_AUDIO)) is not None:
            drawn = [self._draws.draw_codes(cut, codec) for cut in cuts]
            rows = _same_codebooks([row for _, row in drawn], cuts)
            batch = _padded(CONTEXT_CODES, "context_code_lens", rows, self.code_pad_id)
        else:
            drawn = [self._draws.draw_audio(cut, *self._audio_form(cuts)) for cut in cuts]
            batch = _padded(CONTEXT_AUDIO, "context_audio_lens", [row for _, row in drawn])
        batch["context_durations"] = torch.tensor(
            [part.length * part.frame_shift for part, _ in drawn], dtype=torch.float32
        )
        if self.audio_16khz == "context":
            audio = [load_audio(cut, CONTEXT_AUDIO, _16KHZ) for cut in cuts]
            rows = [part.of_samples(samples, _16KHZ) for (part, _), samples in zip(drawn, audio, strict=True)]
            batch |= _padded("audio_16khz", "audio_16khz_lens", rows)
        return batch

    def _audio_form(self, cuts: list[MonoCut]) -> tuple[int, int]:
        """Return the sampling rate (Hz) of a batch's audio, and the number of samples per frame (1 without a codec)."""
        if self.codec is not None:
            return self.codec.sampling_rate, self.codec.samples_per_frame
        if self.sampling_rate is not None:
            return self.sampling_rate, 1
        rates = {int(found.sampling_rate): cut for cut in cuts if (found := recording_of(cut)) is not None}
        found_rates = " and ".join(f"{cut.id!r} has {rate} Hz" for rate, cut in rates.items())
        refuse_example(
            (len(rates) > 1, f"cut {found_rates}, but a batch has a single rate: set sampling_rate= to resample")
        )
        return next(iter(rates)), 1

    def _codec_of(self, cuts: list[MonoCut], codes: str, audio: str) -> CodecForm | None:
        """Return the codec if all cuts have the field ``codes``; None if all cuts have the field ``audio`` instead.

        Raises:
            ValueError: only some of the cuts have ``codes``, or a cut has neither field.
        """
        with_codes = [cut for cut in cuts if self.codes and holds(cut, codes)]
        if len(with_codes) == len(cuts):
            return self.codec
        if with_codes:
            other = next(cut for cut in cuts if not holds(cut, codes))
            raise ValueError(
                f"cut {with_codes[0].id!r} has {codes} but cut {other.id!r} has none: exclude cuts without codes, or "
                "load audio for all cuts with codes=False"
            )
        for cut in cuts:
            if not holds(cut, audio):
                wanted = f"neither {codes} nor {audio}" if self.codes else f"no {audio}"
                is_own = CONTEXT_UNALIGNED in (cut.custom or {})
                if audio == CONTEXT_AUDIO and is_own and CONTEXT_KEYS[0] not in (cut.supervisions[0].custom or {}):
                    raise ValueError(
                        f"cut {cut.id!r} has {wanted}, because its dataset was built without contexts (match: null): "
                        "set context=False, or use a dataset with contexts"
                    )
                otherwise = ", or set context=False" if audio == CONTEXT_AUDIO else ""
                raise ValueError(
                    f"cut {cut.id!r} has {wanted}: request the field in open_shar(..., fields=[...]){otherwise}"
                )
        return None


def _same_codebooks(rows: list[np.ndarray], cuts: list[MonoCut]) -> list[np.ndarray]:
    first, count = cuts[0].id, len(rows[0])
    refuse_example(*(
        (len(row) != count,
         f"cut {first!r} has {count} codebooks but cut {cut.id!r} has {len(row)}: batch only cuts of one codec")
        for row, cut in zip(rows, cuts, strict=True)
    ))  # fmt: skip
    return rows


def _tags_of(examples: Sequence[Any], names: Sequence[str]) -> list[dict[str, Any]]:
    """Return, for each example, a dict of the requested tags that it has."""
    customs = [example.custom or {} for example in examples]
    return [{name: custom[name] for name in names if name in custom} for custom in customs]


def _padded(
    name: str, lengths: str, rows: Sequence[np.ndarray], value: int = 0, *, multiple: int = 1, at_least: int = 0
) -> Batch:
    """Pad B rows (..., length) into one tensor (B, ..., longest), and return it with the lengths (B,) of the rows.

    Args:
        name, lengths: keys of the two tensors in the result.
        value: value of the padding.
        at_least: minimum of ``longest``.
        multiple: ``longest`` is rounded up to a multiple of this number.
    """
    sizes = [row.shape[-1] for row in rows]
    longest = -(-max(*sizes, at_least) // multiple) * multiple
    result = np.full((len(rows), *rows[0].shape[:-1], longest), value, dtype=rows[0].dtype)
    for target, row in zip(result, rows, strict=True):
        target[..., : row.shape[-1]] = row
    return {name: torch.from_numpy(result), lengths: torch.tensor(sizes, dtype=torch.int64)}


class Kind(IntEnum):
    """Kind of content at a position of a sequence."""

    PADDING = 0
    TEXT = 1
    CODES = 2
    AUDIO = 3


@dataclass(frozen=True)
class Positions:
    """A run of consecutive positions of one kind.

    Attributes:
        values: token ids (positions,), codes (codebooks, positions) or samples (positions, samples per frame).
        predicted: bool (positions,); true if a model learns to predict the position from the earlier ones.
    """

    kind: Kind
    values: np.ndarray
    predicted: np.ndarray


class SpeechTextDataset(torch.utils.data.Dataset[Batch]):
    """A dataset that turns any mixture of utterances, texts, pairs of texts and conversations into batches.

    Each example becomes one sequence, in which a position is a token of text or a frame of speech:

    * An utterance (a cut) becomes its text, if it has one, a slice of its context, and the target, whose codes are
      predicted.
    * A pair of texts or a chat becomes its tokens, of which the assistant's are predicted. All tokens of a single text
      are predicted.
    * A conversation becomes the tokens of its turns. Each audio locator, which is the placeholder of an audio turn, is
      replaced by the frames of the turn. A turn whose cut has codes is added as codes; any other audio turn of the user
      is added as samples.

    A batch of B examples, the longest with P positions, has these entries. All entries are always present, even if the
    batch contains only text or only speech.

    ================= ===================== ====================================================================
    entry             type, shape           content
    ================= ===================== ====================================================================
    ``ids``           list of B             ids of cuts and conversations; for text, a checksum of the text
    ``tags``          list of B             for each example, a dict of the requested ``tags`` that it has
    ``lengths``       int64 (B,)            number of positions without the padding at the end
    ``kinds``         int64 (B, P)          ``Kind``: 0 padding, 1 text, 2 codes, 3 audio
    ``spans``         int64 (B, P)          number of the span, from 0: a text, a context, a target and so on
    ``predicted``     bool (B, P)           true if a model learns to predict the position from the earlier ones
    ``text_tokens``   int64 (B, P)          token ids at positions of kind 1, otherwise 0
    ``codes``         int64 (B, C, P)       codes at positions of kind 2, with BOS and EOS in each span; otherwise 0
    ``audio``         float32 (A, S)        samples of the A frames of kind 3 in the whole batch, row after row
    ================= ===================== ====================================================================

    For example, ``hidden[batch["kinds"] == Kind.AUDIO] = embed(batch["audio"])`` embeds the audio.

    Text must be prompted by the loader's ``prompt_format``, which sets ``input_ids`` and the ``mask`` of predicted
    tokens and chooses the prompt of each group by the tag ``context``. Only utterances may come without a prompt
    format: their text is then tokenized by ``tokenizer``, and all its tokens are predicted.

    The slice of a context equals the one that ``ContextSpeechDataset`` draws with the same seed.

    Args:
        codec: the form of the codes and of the frames of audio, such as ``CodecForm.of_dataset("data/librispeech")``.
        tokenizer: the loader's tokenizer: a function from text to ids, or an object of NeMo with ``text_to_ids``. The
            locator of audio turns should be one of its special tokens.
        context: True requires a context for each utterance. None uses the contexts that exist. False omits contexts.
        context_duration_min, context_duration_max: seconds; see ``ContextSpeechDataset``.
        tags: names of the tags to return; entries of ``input_cfg`` set the tags of their data.
        text_bos_id, text_eos_id: ids added around the text of an utterance that has no prompt format.
        seed: seed of the slices of contexts.

    Raises:
        ConfigError: the codec's form lacks the number of codebooks.
        ValueError: the limits of the context's duration contradict each other.

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
        context: bool | None = True,
        context_duration_min: float = 3.0,
        context_duration_max: float = 10.0,
        tags: Sequence[str] = (),
        text_bos_id: int | None = None,
        text_eos_id: int | None = None,
        seed: int = 0,
    ) -> None:
        self.codec, self.num_codebooks = codec, codec.num_codebooks or 0
        refuse(
            (not self.num_codebooks, "the CodecForm has no num_codebooks: set it, since batches of text need it too"),
            code="bad_codec",
        )
        self.tokenizer: Tokenizers = getattr(tokenizer, "text_to_ids", tokenizer)
        check_tokenizers(self.tokenizer)
        self.context = context
        self.tags = tuple(tags)
        self.text_marks = (text_bos_id, text_eos_id)
        self._draws = ContextDraws(context_duration_min, context_duration_max, seed)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch that determines the slices of the next batches; call this before a loader begins an epoch."""
        self._draws.epoch.fill_(epoch)

    def __getitem__(self, examples: CutSet) -> Batch:
        """Return the batch of these examples.

        Raises:
            ConfigError: the loader's settings or the fields of the dataset do not provide what the batch needs.
            ValueError: an example cannot be turned into a sequence; the message names the example.
        """
        batch_examples = list(examples)
        refuse_example((not batch_examples, "the batch has no examples"))
        sequences = [self.spans_of(example) for example in batch_examples]
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
        # The first position cannot be predicted, because no position comes before it.
        predicted[:, :1] = False
        arrays = {
            "lengths": np.array(lengths), "kinds": kinds, "spans": numbers, "predicted": predicted,
            "text_tokens": tokens, "codes": codes, "audio": np.concatenate(audio),
        }  # fmt: skip
        return {name: torch.from_numpy(array) for name, array in arrays.items()} | {
            "ids": [_id_of(example) for example in batch_examples],
            "tags": _tags_of(batch_examples, self.tags),
        }

    def spans_of(self, example: Any) -> list[Positions]:
        """Return the spans that make up the sequence of one example, in order."""
        if isinstance(example, MonoCut):
            return [span for span in self._utterance(example) if len(span.predicted)]
        name = _id_of(example)
        refuse_example(
            (isinstance(example, Cut),
             f"cut {name!r} is a {type(example).__name__}: sequences are built only from MonoCuts without padding"),
        )  # fmt: skip
        refuse(
            (getattr(example, "input_ids", None) is None,
             f"{name!r} has no input_ids: set prompt_format in the loader's settings, for example to plain"),
            code="missing_key",
        )  # fmt: skip
        return list(self._conversation(example))

    def _utterance(self, cut: MonoCut) -> Iterator[Positions]:
        """Yield the spans of a cut: its text, its context and its target."""
        require_one_supervision(cut)
        if getattr(cut, "input_ids", None) is not None:
            yield Positions(Kind.TEXT, *_prompted(cut))
        else:
            text = text_of(cut, "text") or ""
            tokens = tokenize(self.tokenizer, text, cut.supervisions[0].language, cut.id, self.text_marks)
            yield Positions(Kind.TEXT, np.array(tokens, dtype=np.int64), np.ones(len(tokens), dtype=bool))
        has_context = holds(cut, CONTEXT_CODES)
        refuse(
            (self.context and not has_context,
             f"cut {cut.id!r} has no {CONTEXT_CODES}: add the field to fields, encode the dataset, or create the "
             "SpeechTextDataset with context=False for data without contexts"),
            (not holds(cut, TARGET_CODES),
             f"cut {cut.id!r} has no {TARGET_CODES}: add the field to fields, or encode the dataset"),
            code="unknown_field",
        )  # fmt: skip
        if has_context and self.context is not False:
            _, marked = self._draws.draw_codes(cut, self.codec)
            yield self._codes_span(marked, cut, predicted=False)
        yield self._codes_span(load_target(cut, self.codec), cut, predicted=True)

    def _conversation(self, example: Any) -> Iterator[Positions]:
        """Yield the spans of a text or a conversation; the frames of each audio turn replace its locator tokens."""
        tokens, predicted = _prompted(example)
        turns = [turn for turn in getattr(example, "turns", ()) if hasattr(turn, "cut")]
        begin = 0
        for turn, (first, last) in zip(turns, self._locators(tokens, turns, example), strict=True):
            if first > begin:
                yield Positions(Kind.TEXT, tokens[begin:first], predicted[begin:first])
            yield self._audio_turn(turn.cut, bool(predicted[first]), example)
            begin = last
        if begin < len(tokens):
            yield Positions(Kind.TEXT, tokens[begin:], predicted[begin:])

    def _locators(self, tokens: np.ndarray, turns: list[Any], example: Any) -> list[tuple[int, int]]:
        """Return the positions (start, end) of each audio turn's locator in the tokens."""
        places: list[tuple[int, int]] = []
        if turns:
            ids = tokenize(self.tokenizer, turns[0].audio_locator_tag, None, _id_of(example))
            firsts = range(len(tokens) - len(ids) + 1)
            places = [(first, first + len(ids)) for first in firsts if tokens[first : first + len(ids)].tolist() == ids]
        if len(places) != len(turns):
            tag = turns[0].audio_locator_tag
            texts = [turn for turn in example.turns if tag in str(getattr(turn, "value", ""))]
            problem = (
                f"a text turn of {texts[0].role} that contains the audio_locator_tag {tag!r}: remove it from the text, "
                "or set a tag that occurs in no text"
                if texts
                else f"{len(turns)} audio turns but {len(places)} occurrences of the tokens of {tag!r}: make the "
                "audio_locator_tag a special token of the tokenizer"
            )
            raise ConfigError(f"conversation {_id_of(example)!r} has {problem}", code="bad_config_value")
        return places

    def _audio_turn(self, cut: MonoCut, predicted: bool, example: Any) -> Positions:
        """Return the frames of an audio turn: its codes or, without codes, its samples, which cannot be predicted."""
        if holds(cut, TARGET_CODES):
            return self._codes_span(load_target(cut, self.codec), cut, predicted=predicted)
        refuse(
            (predicted,
             f"an audio turn of the assistant in conversation {_id_of(example)!r} has no {TARGET_CODES}, and audio "
             "cannot be predicted: take the turn from a dataset with codes, or remove it"),
            code="unknown_field",
        )  # fmt: skip
        rate = self.codec.sampling_rate
        if holds(cut, TARGET_AUDIO):
            samples = load_audio(cut, TARGET_AUDIO, rate)
        elif CONTEXT_UNALIGNED in (cut.custom or {}):
            raise ValueError(
                f"cut {cut.id!r} of a conversation has neither {TARGET_CODES} nor {TARGET_AUDIO}: add one to fields"
            )
        else:
            # The cut is not from a sharmill dataset, so its audio is loaded from its own file.
            samples = mono(cut.resample(rate).load_audio(), f"the audio of cut {cut.id!r}")
        size = self.codec.samples_per_frame
        frames = np.pad(samples, (0, -len(samples) % size)).reshape(-1, size)
        return Positions(Kind.AUDIO, frames, np.zeros(len(frames), dtype=bool))

    def _codes_span(self, marked: np.ndarray, cut: MonoCut, *, predicted: bool) -> Positions:
        refuse(
            (len(marked) != self.num_codebooks,
             f"the codes of cut {cut.id!r} have {len(marked)} codebooks, but the codec has {self.num_codebooks}"),
            code="bad_codec",
        )  # fmt: skip
        mask = np.full(marked.shape[1], predicted)
        # The model is given BOS at inference, so BOS need not be predicted.
        mask[: int(self.codec.marks)] = False
        return Positions(Kind.CODES, marked, mask)


def _id_of(example: Any) -> str:
    """Return the id of an example; texts have no id, so theirs is derived from a checksum."""
    if (found := getattr(example, "id", None)) is not None:
        return str(found)
    parts = [example.source, example.target] if hasattr(example, "source") else [example]
    text = "\n".join(getattr(part, "text", None) or repr(getattr(part, "data", "")) for part in parts)
    return f"text-{checksum_bytes(text.encode())}"


def _prompted(example: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return the token ids of an example from the loader's prompt format, and a mask of the predicted tokens.

    No token is predicted if the last turn is not the assistant's, as at inference.
    """
    tokens = np.asarray(example.input_ids, dtype=np.int64)
    mask = getattr(example, "mask", None)
    return tokens, np.zeros(len(tokens), dtype=bool) if mask is None else np.asarray(mask, dtype=bool)
