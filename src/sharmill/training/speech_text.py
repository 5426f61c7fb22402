"""Batches of padded tensors for TTS and speech language models, made of the cuts or examples that a sampler chose.

``ContextSpeechDataset`` is for cuts alone, ``SpeechTextDataset`` for any mixture of speech, text and conversations.
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
    """A maker of batches: text tokens, target, and a random slice of the context of each cut as tensors.

    A batch of B cuts has these entries. Tensors are padded at the end; the lengths say where the padding begins.

    ============================ ===================== =========================================================
    entry                        type, shape           content
    ============================ ===================== =========================================================
    ``ids``                      list of B             cut ids
    ``text``, ``language``       lists of B            of the supervision; None where it has none
    ``speaker``                  list of B             the speaker tag; None where there is none
    ``tags``                     list of B             dicts of those ``tags`` of the loader's entry that a cut has;
                                                       only where some are named
    ``durations``                float32 (B,)          seconds of the target
    ``similarity``               float32 (B,)          of target and context; NaN where it is not known
    ``text_tokens``              int64 (B, N)          padded with ``text_pad_id``; only with a ``tokenizer``
    ``text_lens``                int64 (B,)            tokens, begin and end included
    ``target_codes``             int64 (B, C, T)       BOS, codes, EOS in every codebook; padded with ``code_pad_id``
    ``target_code_lens``         int64 (B,)            frames, BOS and EOS included
    ``context_codes``            int64 (B, C, T)       a slice of the context in the same form
    ``context_code_lens``        int64 (B,)            frames, BOS and EOS included
    ``context_durations``        float32 (B,)          seconds of the slice, without BOS and EOS
    ``target_audio``             float32 (B, L)        instead of ``target_codes`` where cuts have no codes: samples at
                                                       the codec's rate, padded with 0 to whole frames of the codec;
                                                       without a codec at ``sampling_rate``, a frame being a sample
    ``target_audio_lens``        int64 (B,)            samples, without padding
    ``context_audio``            float32 (B, L)        instead of ``context_codes``; whole frames
    ``context_audio_lens``       int64 (B,)            samples
    ``audio_16khz``              float32 (B, L)        only with ``audio_16khz``: the whole target, or the seconds of
                                                       the context that were sliced; padded with 0
    ``audio_16khz_lens``         int64 (B,)            samples
    ============================ ===================== =========================================================

    Cuts may be truncated: the target is the cut's part, the context is whole. Where the target is audio, they may be
    perturbed (speed, volume); a cut whose codes would have to follow is refused, like one that is mixed.

    Cuts may be padded at their end, as by ``pad_min_duration: 30`` of the loader. Lengths and ``durations`` are those
    without it; the target's tensors, and ``audio_16khz`` of the target, reach to the end of the longest padded cut.

    To predict the next frame, use ``target_codes[..., :-1]`` as input and ``target_codes[..., 1:]`` as labels.

    The slice of a context is a function of ``seed``, the epoch and the cut's id alone: not of the batch, the rank, the
    worker or what came before, so that a resumed epoch has the slices of one that was not interrupted. The epoch is
    the one that the cut's reader was in, where the cut tells it (``shar_position``, ``shar_epoch``), together with what
    ``set_epoch`` was given last.

    Args:
        codec: the form of the codes; ``CodecForm.of_dataset("data/librispeech")``. Its rate is that of audio as well.
            None for data without codes: batches then have audio.
        tokenizer: from text to ids, or one such function for each language; None for data without text.
        context: False for data without contexts, or to leave them out.
        context_duration_min: seconds; a shorter context is repeated from its beginning.
        context_duration_max: seconds; what is longer is cut at a random place. See ``ContextDraws``.
        audio_16khz: whose audio at 16 kHz to add, for speaker models.
        tags: names of tags that the entries of ``input_cfg`` give their cuts, to tell the groups of a batch apart.
        text_field: where the text is: in the supervision, or in its ``custom`` under this name.
        text_bos_id: added before the tokens if it is not None.
        text_eos_id: added after the tokens if it is not None.
        codes: False loads audio also where there are codes.
        sampling_rate: Hz, of audio where ``codec`` is None; by default the rate that the audio has, which must be the
            same for all cuts of a batch.

    Raises:
        ValueError: options that do not go together.

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
             f"audio has the codec's rate, {rate}: leave out sampling_rate, or the codec"),
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
        """Draw other slices from the next batch on; to be called before a loader begins an epoch."""
        self._draws.epoch.fill_(epoch)

    def __getitem__(self, cuts: CutSet) -> Batch:
        """Return the batch of these cuts.

        Raises:
            ValueError: a cut lacks what the batch needs, or not all have it in the same form; the message names it.
        """
        unpadded = [without_padding(cut) for cut in cuts]
        refuse_example((not unpadded, "a batch without cuts"))
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
            (not text, f"cut {cut.id!r} has no {self.text_field!r}; use tokenizer=None for data without text")
        )
        ids = tokenize(tokenizer, text, cut.supervisions[0].language, cut.id, self.text_marks)
        return np.array(ids, dtype=np.int64)

    def _targets(self, cuts: list[MonoCut], seconds: float) -> Batch:
        """Return the targets in tensors of at least so many seconds."""
        if (codec := self._codec_of(cuts, TARGET_CODES, TARGET_AUDIO)) is not None:
            rows = _same_codebooks([load_target(cut, codec) for cut in cuts], cuts)
            at_least = codec.num_frames(seconds) + 2 * codec.marks
            return _padded(TARGET_CODES, "target_code_lens", rows, self.code_pad_id, at_least=at_least)
        rate, per_frame = self._audio_form(cuts)
        samples = [load_audio(cut, TARGET_AUDIO, rate) for cut in cuts]
        return _padded(TARGET_AUDIO, "target_audio_lens", samples, multiple=per_frame, at_least=round(seconds * rate))

    def _contexts(self, cuts: list[MonoCut]) -> Batch:
        """Return a slice of each context, and with ``audio_16khz`` the same seconds at that rate."""
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
        """Return the rate of a batch's audio, and the samples of a frame: one where there is no codec."""
        if self.codec is not None:
            return self.codec.sampling_rate, self.codec.samples_per_frame
        if self.sampling_rate is not None:
            return self.sampling_rate, 1
        rates = {int(found.sampling_rate): cut for cut in cuts if (found := recording_of(cut)) is not None}
        told = " and ".join(f"{cut.id!r} has {rate} Hz" for rate, cut in rates.items())
        refuse_example((len(rates) > 1, f"cut {told}; a batch has one rate: give sampling_rate="))
        return next(iter(rates)), 1

    def _codec_of(self, cuts: list[MonoCut], codes: str, audio: str) -> CodecForm | None:
        """Return the codec if the batch has this side as codes, all of it, and None if it has it as audio."""
        with_codes = [cut for cut in cuts if self.codes and holds(cut, codes)]
        if len(with_codes) == len(cuts):
            return self.codec
        if with_codes:
            other = next(cut for cut in cuts if not holds(cut, codes))
            raise ValueError(
                f"cut {with_codes[0].id!r} has {codes} and cut {other.id!r} has none; a batch has one form: "
                "leave out such cuts, or load audio for all with codes=False"
            )
        for cut in cuts:
            if not holds(cut, audio):
                wanted = f"neither {codes} nor {audio}" if self.codes else f"no {audio}"
                is_own = CONTEXT_UNALIGNED in (cut.custom or {})
                if audio == CONTEXT_AUDIO and is_own and CONTEXT_KEYS[0] not in (cut.supervisions[0].custom or {}):
                    raise ValueError(
                        f"cut {cut.id!r} has {wanted}: its dataset was made without contexts (match: null); give "
                        "context=False, or use a dataset with contexts"
                    )
                otherwise = ", or give context=False" if audio == CONTEXT_AUDIO else ""
                raise ValueError(
                    f"cut {cut.id!r} has {wanted}; name these fields in open_shar(..., fields=[...]){otherwise}"
                )
        return None


def _same_codebooks(rows: list[np.ndarray], cuts: list[MonoCut]) -> list[np.ndarray]:
    first, count = cuts[0].id, len(rows[0])
    refuse_example(*(
        (len(row) != count,
         f"cut {first!r} has {count} codebooks and cut {cut.id!r} has {len(row)}: a batch is of one codec")
        for row, cut in zip(rows, cuts, strict=True)
    ))  # fmt: skip
    return rows


def _tags_of(examples: Sequence[Any], names: Sequence[str]) -> list[dict[str, Any]]:
    """Return those of the named tags that each example has."""
    customs = [example.custom or {} for example in examples]
    return [{name: custom[name] for name in names if name in custom} for custom in customs]


def _padded(
    name: str, lengths: str, rows: Sequence[np.ndarray], value: int = 0, *, multiple: int = 1, at_least: int = 0
) -> Batch:
    """Return rows (..., length) as one tensor (B, ..., longest), and their lengths (B,).

    The longest is ``at_least`` so long, and rounded up to ``multiple``.
    """
    sizes = [row.shape[-1] for row in rows]
    longest = -(-max(*sizes, at_least) // multiple) * multiple
    result = np.full((len(rows), *rows[0].shape[:-1], longest), value, dtype=rows[0].dtype)
    for target, row in zip(result, rows, strict=True):
        target[..., : row.shape[-1]] = row
    return {name: torch.from_numpy(result), lengths: torch.tensor(sizes, dtype=torch.int64)}


class Kind(IntEnum):
    """Content of a position."""

    PADDING = 0
    TEXT = 1
    CODES = 2
    AUDIO = 3


@dataclass(frozen=True)
class Positions:
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
        context: False for data without contexts, or to leave them out; None takes them where an utterance has one.
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
            (not self.num_codebooks, "the CodecForm has no num_codebooks, which a batch of text alone needs as well"),
            code="bad_codec",
        )
        self.tokenizer: Tokenizers = getattr(tokenizer, "text_to_ids", tokenizer)
        check_tokenizers(self.tokenizer)
        self.context = context
        self.tags = tuple(tags)
        self.text_marks = (text_bos_id, text_eos_id)
        self._draws = ContextDraws(context_duration_min, context_duration_max, seed)

    def set_epoch(self, epoch: int) -> None:
        """Draw other slices from the next batch on; to be called before a loader begins an epoch."""
        self._draws.epoch.fill_(epoch)

    def __getitem__(self, examples: CutSet) -> Batch:
        """Return the batch of these examples.

        Raises:
            ConfigError: the loader's settings, or the fields of the dataset, do not give what the batch needs.
            ValueError: an example is not what a sequence can be made of; the message names it.
        """
        batch_examples = list(examples)
        refuse_example((not batch_examples, "a batch without examples"))
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
        # Nothing comes before the first position.
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
        """Return the sequence of one example, span by span."""
        if isinstance(example, MonoCut):
            return [span for span in self._utterance(example) if len(span.predicted)]
        name = _id_of(example)
        refuse_example(
            (isinstance(example, Cut),
             f"cut {name!r} is a {type(example).__name__}; sequences are made of MonoCuts, without padding"),
        )  # fmt: skip
        refuse(
            (getattr(example, "input_ids", None) is None,
             f"{name!r} came without input_ids: set prompt_format in the loader's settings, which may be plain"),
            code="missing_key",
        )  # fmt: skip
        return list(self._conversation(example))

    def _utterance(self, cut: MonoCut) -> Iterator[Positions]:
        """Yield text, context and target of a cut."""
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
             f"cut {cut.id!r} has no {CONTEXT_CODES}: name them in fields, encode the dataset, or make the "
             "SpeechTextDataset with context=False for data without contexts"),
            (not holds(cut, TARGET_CODES),
             f"cut {cut.id!r} has no {TARGET_CODES}: name them in fields, or encode the dataset"),
            code="unknown_field",
        )  # fmt: skip
        if has_context and self.context is not False:
            _, marked = self._draws.draw_codes(cut, self.codec)
            yield self._codes_span(marked, cut, predicted=False)
        yield self._codes_span(load_target(cut, self.codec), cut, predicted=True)

    def _conversation(self, example: Any) -> Iterator[Positions]:
        """Yield the tokens of a text or of turns, and in the place of each locator the frames of its audio turn."""
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

    def _audio_turn(self, cut: MonoCut, predicted: bool, example: Any) -> Positions:
        """Return the frames of an audio turn: its codes, or else its samples, which cannot be predicted."""
        if holds(cut, TARGET_CODES):
            return self._codes_span(load_target(cut, self.codec), cut, predicted=predicted)
        refuse(
            (predicted,
             f"an audio turn of the assistant in conversation {_id_of(example)!r} has no {TARGET_CODES}, and audio "
             "cannot be predicted: make it of a dataset with codes, or leave it out"),
            code="unknown_field",
        )  # fmt: skip
        rate = self.codec.sampling_rate
        if holds(cut, TARGET_AUDIO):
            samples = load_audio(cut, TARGET_AUDIO, rate)
        elif CONTEXT_UNALIGNED in (cut.custom or {}):
            raise ValueError(
                f"cut {cut.id!r} of a conversation has neither {TARGET_CODES} nor {TARGET_AUDIO}: name one in fields"
            )
        else:
            # Not a cut of ours: its audio is in its file.
            samples = mono(cut.resample(rate).load_audio(), f"the audio of cut {cut.id!r}")
        size = self.codec.samples_per_frame
        frames = np.pad(samples, (0, -len(samples) % size)).reshape(-1, size)
        return Positions(Kind.AUDIO, frames, np.zeros(len(frames), dtype=bool))

    def _codes_span(self, marked: np.ndarray, cut: MonoCut, *, predicted: bool) -> Positions:
        refuse(
            (len(marked) != self.num_codebooks,
             f"the codes of cut {cut.id!r} have {len(marked)} codebooks, and the codec has {self.num_codebooks}"),
            code="bad_codec",
        )  # fmt: skip
        mask = np.full(marked.shape[1], predicted)
        # The begin of the codes is given, as it is when a model is used.
        mask[: int(self.codec.marks)] = False
        return Positions(Kind.CODES, marked, mask)


def _id_of(example: Any) -> str:
    """Return the id of an example; text has none, and gets one made from it."""
    if (found := getattr(example, "id", None)) is not None:
        return str(found)
    parts = [example.source, example.target] if hasattr(example, "source") else [example]
    text = "\n".join(getattr(part, "text", None) or repr(getattr(part, "data", "")) for part in parts)
    return f"text-{checksum_bytes(text.encode())}"


def _prompted(example: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return the tokens that the loader's prompt format made, and which of them are predicted.

    None is where the last turn is not the assistant's, as at inference.
    """
    tokens = np.asarray(example.input_ids, dtype=np.int64)
    mask = getattr(example, "mask", None)
    return tokens, np.zeros(len(tokens), dtype=bool) if mask is None else np.asarray(mask, dtype=bool)
