"""Keys of the stage ``match``."""

from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

import msgspec

from sharmill.config import Above0, NotNegative, Positive, Precision, Presence, Share, StageSection, require
from sharmill.registry import ENCODERS

Similarity = Annotated[float, msgspec.Meta(ge=-1, le=1)]


@dataclass(frozen=True, kw_only=True)
class MatchConfig(StageSection):
    """Choice of the context: the most similar utterance of the same speaker group that meets these conditions. ``null``
    in the place of the keys makes a dataset without contexts: of cuts, target audio and target codes, with all stages
    but match. Records need no speaker then."""

    presence: ClassVar[Presence] = "unless_null"
    without: ClassVar[str] = "a dataset without contexts"
    makes_contexts: ClassVar[bool] = True
    options_of: ClassVar = (ENCODERS, "encoder")

    encoder: str = "resemblyzer"
    """Speaker encoder: ``resemblyzer`` (its weights come with the Python package), ``nemo:titanet_large`` or another
    pretrained name, or ``nemo:/path/model.nemo``."""
    min_similarity: Similarity | None = None
    """Lowest cosine similarity of a context to its target. ``null`` is the encoder's own: 0.75 for ``resemblyzer``, 0.6
    for TitaNet; any other encoder needs a number here."""
    max_similarity: Similarity | None = None
    """Highest cosine similarity of a context to its target, against copies that are stored with loss or otherwise
    processed, such as 0.99; ``null`` is no limit. Copies with the same samples are never a context; a copy at another
    sampling rate needs this limit."""
    min_duration: NotNegative = 3.0
    """Shortest context, in seconds."""
    max_duration: float | None = None
    """Longest context, in seconds; ``null`` is no limit."""
    batch_seconds: Above0 = 60.0
    """Audio in one batch of the encoder, in seconds, padding included. On a CPU no batch has more than 16 s."""
    precision: Precision = "fp32"
    """Arithmetic of the encoder: ``fp32``; ``tf32``, which GPUs from compute capability 8.0 on have and CPUs have not;
    or ``bf16``, torch's autocast, on these GPUs and on CPUs. Similarities differ a little, and with them some choices.
    """
    resampling: Literal["soxr", "kaiser", "sinc"] = "soxr"
    """Resampling of audio to the rate of the encoder: ``soxr`` is libsoxr at high quality, as in the published scripts
    (librosa's ``soxr_hq``); ``kaiser`` torchaudio's with a Kaiser window and 64 zero crossings; ``sinc`` torchaudio's
    default, which is less exact near the highest frequencies. What is stored or encoded is resampled as Lhotse does."""
    # With 2, a group of odd size would leave an utterance alone.
    max_group: Annotated[int, msgspec.Meta(ge=3)] | None = None
    """Split speaker groups with more utterances than this into parts, so that a corpus of few speakers uses every rank.
    A context then comes from the same part. ``null`` splits nothing."""
    exclude_same_text: bool = False
    """Leave out candidates that have the target's text."""
    max_text_overlap: Share | None = None
    """Leave out candidates that share more than this part of their words with the target, such as 0.5: distinct words
    in common over those of the text that has fewer; ``null`` is no limit."""
    max_speaker_items: Annotated[int, msgspec.Meta(ge=2)] | None = None
    """Choose the contexts of a speaker group from a random pool of so many of its utterances, drawn by ``seed``;
    ``null`` is all of them."""
    contexts: Literal["choose", "given"] = "choose"
    """``given`` keeps the contexts of the manifest (``context_audio_filepath`` and the further keys): each is checked,
    what it leaves out is filled in, and one that cannot be used, or is outside the limits above, makes its record a
    reject (``bad_context``). Records without one get theirs as by ``choose``."""
    choice: Literal["best", "sample"] = "best"
    """``best`` takes the most similar candidate. ``sample`` draws among the ``sample_size`` most similar, so that a
    popular clip does not become the context of everything."""
    sample_size: Positive = 5
    """Number of candidates that ``choice: sample`` draws from."""
    seed: int = 42
    """Seed of ``choice: sample`` and ``max_speaker_items``."""
    contexts_from_dataset: bool = False
    """Of an append: contexts may also come from the dataset of ``append_to``. Its cuts that share a speaker
    group with new records are embedded once more, from the stored audio."""
    unit_seconds: Above0 | None = None
    """Audio that one unit of work gathers, in seconds; ``null`` derives it from the total."""
    options: dict[str, Any] = field(default_factory=dict)
    """Options of the encoder's family, which a configuration has beside ``encoder``."""

    def __post_init__(self) -> None:
        require(self.min_similarity is None or self.max_similarity is None
                 or self.min_similarity <= self.max_similarity,
                 "max_similarity must not be less than min_similarity")  # fmt: skip
        require(self.max_duration is None or self.max_duration >= self.min_duration,
                 "max_duration must not be less than min_duration")  # fmt: skip
