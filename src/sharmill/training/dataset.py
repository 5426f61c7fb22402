"""Batches of padded tensors for TTS and speech language models, made of the cuts that a sampler chose.

The docstring of ``ContextSpeechDataset`` lists the entries of a batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch

from sharmill.shar.layout import CONTEXT_AUDIO, CONTEXT_CODES, TARGET_AUDIO, TARGET_CODES
from sharmill.training.codes import CodecForm, ContextDraws, load_target, mark_codes
from sharmill.training.cut_data import (
    ContextSlice,
    holds,
    is_without_context,
    load_array,
    load_audio,
    sampling_rate_of,
    text_of,
    without_padding,
)
from sharmill.training.tokenizers import Tokenizers, check_tokenizers, tokenize

if TYPE_CHECKING:
    from lhotse import CutSet, MonoCut, SupervisionSegment

Batch = dict[str, torch.Tensor | list[Any]]

_SIMILARITY = "context_speaker_similarity"
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
        context_duration_max: seconds; what is longer is cut at a random place. See ``ContextLimits``.
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
        if audio_16khz == "context" and not context:
            raise ValueError("audio_16khz='context' needs contexts")
        if codec is not None and sampling_rate not in (None, codec.sampling_rate):
            raise ValueError(
                f"audio has the codec's rate, {codec.sampling_rate}: leave out sampling_rate, or the codec"
            )
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
        self._draws.set_epoch(epoch)

    def __getitem__(self, cuts: CutSet) -> Batch:
        """Return the batch of these cuts.

        Raises:
            ValueError: a cut lacks what the batch needs, or not all have it in the same form; the message names it.
        """
        unpadded = [without_padding(cut) for cut in cuts]
        cuts_list = [cut for cut, _ in unpadded]
        batch = _describe(cuts_list, self.text_field)
        seconds = max(seconds for _, seconds in unpadded)
        if self.tags:
            customs = [cut.custom or {} for cut in cuts_list]
            batch["tags"] = [{name: custom[name] for name in self.tags if name in custom} for custom in customs]
        if self.tokenizer is not None:
            batch |= _padded("text_tokens", "text_lens", [self._tokens(cut) for cut in cuts_list], self.text_pad_id)
        batch |= self._targets(cuts_list, seconds)
        slices = None
        if self.context:
            contexts, slices = self._contexts(cuts_list)
            batch |= contexts
        if self.audio_16khz is not None:
            at_least = round(seconds * _16KHZ) if self.audio_16khz == "target" else 0
            rows = self._audio_16khz(cuts_list, slices)
            batch |= _padded("audio_16khz", "audio_16khz_lens", rows, at_least=at_least)
        return batch

    def _tokens(self, cut: MonoCut) -> np.ndarray:
        assert self.tokenizer is not None
        text = text_of(cut, self.text_field)
        if not text:
            raise ValueError(f"cut {cut.id!r} has no {self.text_field!r}; use tokenizer=None for data without text")
        ids = tokenize(self.tokenizer, text, cut.supervisions[0].language, cut.id)
        bos, eos = self.text_marks
        return np.array([*([] if bos is None else [bos]), *ids, *([] if eos is None else [eos])], dtype=np.int64)

    def _targets(self, cuts: list[MonoCut], seconds: float) -> Batch:
        """Return the targets in tensors of at least so many seconds."""
        if self._in_codes(cuts, TARGET_CODES, TARGET_AUDIO):
            assert self.codec is not None
            rows = [load_target(cut, self.codec) for cut in cuts]
            at_least = self.codec.num_frames(seconds) + 2 * self.codec.marks
            rows = _same_codebooks(rows, cuts)
            return _padded(TARGET_CODES, "target_code_lens", rows, self.code_pad_id, at_least=at_least)
        rate, per_frame = self._audio_form(cuts)
        samples = [load_audio(cut, TARGET_AUDIO, rate) for cut in cuts]
        return _padded(TARGET_AUDIO, "target_audio_lens", samples, multiple=per_frame, at_least=round(seconds * rate))

    def _contexts(self, cuts: list[MonoCut]) -> tuple[Batch, list[ContextSlice]]:
        if self._in_codes(cuts, CONTEXT_CODES, CONTEXT_AUDIO):
            assert self.codec is not None
            arrays = [load_array(cut, CONTEXT_CODES) for cut in cuts]
            slices = [
                self._draws.draw(cut, array.shape[-1], self.codec.frame_shift)
                for cut, array in zip(cuts, arrays, strict=True)
            ]
            rows = [
                mark_codes(part.of_frames(array), self.codec, self.codec.context_marks, cut)
                for cut, array, part in zip(cuts, arrays, slices, strict=True)
            ]
            batch = _padded(CONTEXT_CODES, "context_code_lens", _same_codebooks(rows, cuts), self.code_pad_id)
        else:
            rate, per_frame = self._audio_form(cuts)
            samples = [load_audio(cut, CONTEXT_AUDIO, rate) for cut in cuts]
            slices = [
                self._draws.draw(cut, -(-len(audio) // per_frame), per_frame / rate)
                for cut, audio in zip(cuts, samples, strict=True)
            ]
            sliced = [part.of_samples(audio, rate) for part, audio in zip(slices, samples, strict=True)]
            batch = _padded(CONTEXT_AUDIO, "context_audio_lens", sliced)
        batch["context_durations"] = torch.tensor([part.duration for part in slices], dtype=torch.float32)
        return batch, slices

    def _audio_form(self, cuts: list[MonoCut]) -> tuple[int, int]:
        """Return the rate of a batch's audio, and the samples of a frame: one where there is no codec."""
        if self.codec is not None:
            return self.codec.sampling_rate, self.codec.samples_per_frame
        if self.sampling_rate is not None:
            return self.sampling_rate, 1
        rates = {sampling_rate_of(cut): cut for cut in cuts}
        if len(rates) > 1:
            found = " and ".join(f"{cut.id!r} has {rate} Hz" for rate, cut in rates.items())
            raise ValueError(f"cut {found}; a batch has one rate: give sampling_rate=")
        return next(iter(rates)), 1

    def _audio_16khz(self, cuts: list[MonoCut], slices: list[ContextSlice] | None) -> list[np.ndarray]:
        if self.audio_16khz == "target":
            return [load_audio(cut, TARGET_AUDIO, _16KHZ) for cut in cuts]
        assert slices is not None
        return [
            part.of_samples(load_audio(cut, CONTEXT_AUDIO, _16KHZ), _16KHZ)
            for cut, part in zip(cuts, slices, strict=True)
        ]

    def _in_codes(self, cuts: list[MonoCut], codes: str, audio: str) -> bool:
        """Return True if the batch has this side as codes: all of it or nothing."""
        with_codes = [cut for cut in cuts if self.codes and holds(cut, codes)]
        if len(with_codes) == len(cuts):
            return True
        if with_codes:
            other = next(cut for cut in cuts if not holds(cut, codes))
            raise ValueError(
                f"cut {with_codes[0].id!r} has {codes} and cut {other.id!r} has none; a batch has one form: "
                "leave out such cuts, or load audio for all with codes=False"
            )
        for cut in cuts:
            if not holds(cut, audio):
                wanted = f"neither {codes} nor {audio}" if self.codes else f"no {audio}"
                if audio == CONTEXT_AUDIO and is_without_context(cut):
                    raise ValueError(
                        f"cut {cut.id!r} has {wanted}: its dataset was made without contexts (match: null); give "
                        "context=False, or use a dataset with contexts"
                    )
                otherwise = ", or give context=False" if audio == CONTEXT_AUDIO else ""
                raise ValueError(
                    f"cut {cut.id!r} has {wanted}; name these fields in open_shar(..., fields=[...]){otherwise}"
                )
        return False


def _describe(cuts: list[MonoCut], text_field: str) -> Batch:
    if not cuts:
        raise ValueError("a batch without cuts")
    for cut in cuts:
        if len(cut.supervisions) != 1:
            raise ValueError(f"cut {cut.id!r} has {len(cut.supervisions)} supervisions instead of one")
    first = [cut.supervisions[0] for cut in cuts]
    return {
        "ids": [cut.id for cut in cuts],
        "text": [text_of(cut, text_field) for cut in cuts],
        "language": [supervision.language for supervision in first],
        "speaker": [supervision.speaker for supervision in first],
        "durations": torch.tensor([cut.duration for cut in cuts], dtype=torch.float32),
        "similarity": torch.tensor([_similarity_of(supervision) for supervision in first], dtype=torch.float32),
    }


def _similarity_of(supervision: SupervisionSegment) -> float:
    found = (supervision.custom or {}).get(_SIMILARITY)
    return math.nan if found is None else float(found)


def _same_codebooks(rows: list[np.ndarray], cuts: list[MonoCut]) -> list[np.ndarray]:
    for row, cut in zip(rows, cuts, strict=True):
        if len(row) != len(rows[0]):
            raise ValueError(
                f"cut {cuts[0].id!r} has {len(rows[0])} codebooks and cut {cut.id!r} has {len(row)}: "
                "a batch is of one codec"
            )
    return rows


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
