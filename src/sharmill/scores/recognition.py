"""Character error rates of an ASR model, which reveal texts that do not match their audio."""

import unicodedata
from collections.abc import Sequence

import torch
import torchaudio

from sharmill.models.families import NemoModel
from sharmill.models.nemo_models import quiet_nemo
from sharmill.scores.scorer import Clip, Score


def load_cer(scorer: NemoModel, device: str) -> Score:
    """Return a scorer that transcribes clips with a NeMo ASRModel, and compares the results with their texts."""
    model = scorer.restore(("preprocessor.", "encoder.", "decoder.", "joint.")).to(device)
    rate = int(model.cfg.preprocessor.sample_rate)

    @torch.inference_mode()
    def score(clips: Sequence[Clip]) -> list[list[float | None]]:
        references = [normalize(clip.text) for clip in clips]
        heard = [clip.samples(rate) for clip, text in zip(clips, references, strict=True) if text]
        with quiet_nemo():
            found = model.transcribe(heard, batch_size=len(heard), num_workers=0, verbose=False) if heard else []
        texts = iter([getattr(one, "text", one) for one in found])
        return [[error_rate(text, normalize(next(texts))) if text else None] for text in references]

    return score


def normalize(text: str) -> str:
    """Return text in Unicode's form NFKC, without case, punctuation, symbols and repeated spaces.

    >>> normalize("Well, it's  5 o’clock!")
    'well its 5 oclock'
    """
    folded = unicodedata.normalize("NFKC", text).casefold()
    return " ".join("".join(char for char in folded if unicodedata.category(char)[0] not in "PS").split())


def error_rate(reference: str, hypothesis: str) -> float:
    """Return the number of inserted, deleted and replaced characters, per character of the reference.

    >>> error_rate("abcd", "abxde")
    0.5
    """
    return torchaudio.functional.edit_distance(reference, hypothesis) / len(reference)
