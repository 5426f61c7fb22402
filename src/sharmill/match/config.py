"""Configuration keys of the stage ``match``."""

from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

import msgspec

from sharmill.config import Above0, NotNegative, Positive, Precision, Presence, Share, StageSection, require
from sharmill.registry import ENCODERS

Similarity = Annotated[float, msgspec.Meta(ge=-1, le=1)]


@dataclass(frozen=True, kw_only=True)
class MatchConfig(StageSection):
    """Choice of the context: the most similar utterance of the same speaker group that satisfies these conditions.
    ``match: null`` skips the stage: the dataset has only cuts, target audio and target codes, and records need no
    speaker."""

    presence: ClassVar[Presence] = "unless_null"
    without: ClassVar[str] = "a dataset without contexts"
    makes_contexts: ClassVar[bool] = True
    options_of: ClassVar = (ENCODERS, "encoder")

    encoder: str = "resemblyzer"
    """Speaker encoder: ``resemblyzer``, whose weights come with the Python package, ``nemo:titanet_large`` or another
    pretrained name, or ``nemo:/path/model.nemo``."""
    min_similarity: Similarity | None = None
    """Minimum cosine similarity between a context and its target. ``null`` uses the encoder's default: 0.75 for
    ``resemblyzer``, 0.6 for TitaNet. Any other encoder needs a number here."""
    max_similarity: Similarity | None = None
    """Maximum cosine similarity, such as 0.99, to exclude processed copies of the target. Copies with the same samples
    are always excluded."""
    max_other_similarity: Similarity | None = None
    """With ``voices``, the maximum similarity of a context to the voice of another group; it must not exceed its
    similarity to its own group either."""
    min_duration: NotNegative = 3.0
    """Minimum duration of a context in seconds."""
    max_duration: float | None = None
    """Maximum duration of a context in seconds."""
    batch_seconds: Above0 = 60.0
    """Audio per batch of the encoder in seconds, including padding. On a CPU, batches contain at most 16 s."""
    precision: Precision = "fp32"
    """Precision of the encoder. ``tf32`` needs a GPU with compute capability 8.0 or higher, ``bf16`` (torch's autocast)
    such a GPU or a CPU. Both change similarities slightly, and therefore some choices."""
    resampling: Literal["soxr", "kaiser", "sinc"] = "soxr"
    """Resampling to the encoder's rate: ``soxr`` is libsoxr at high quality, as in the published scripts; ``kaiser`` is
    torchaudio with a Kaiser window and 64 zero crossings; ``sinc`` is torchaudio's default, less accurate near the
    highest frequencies. Stored or encoded audio is resampled as in Lhotse."""
    # A limit of 2 would leave one utterance of an odd-sized group without candidates.
    max_group: Annotated[int, msgspec.Meta(ge=3)] | None = None
    """Maximum number of utterances per speaker group. Larger groups are split for more ranks; contexts then come from
    the same part."""
    exclude_same_text: bool = False
    """Exclude candidates with the same text as the target."""
    max_text_overlap: Share | None = None
    """Exclude candidates that share more than this fraction of distinct words with the target, relative to the text
    with fewer distinct words."""
    max_speaker_items: Annotated[int, msgspec.Meta(ge=2)] | None = None
    """Choose the contexts of a speaker group from a random pool of this many utterances, drawn with ``seed``."""
    contexts: Literal["choose", "given"] = "choose"
    """``given`` keeps the contexts of the manifest (``context_audio_filepath`` and related keys) and fills in missing
    keys. If a context cannot be used or violates ``min_similarity`` or a duration limit, its record is rejected
    (``bad_context``). Records without a context get one as with ``choose``."""
    choice: Literal["best", "sample"] = "best"
    """``best`` takes the most similar candidate. ``sample`` draws from the ``sample_size`` most similar ones, so that
    no utterance becomes the context of too many others."""
    sample_size: Positive = 5
    """Number of candidates that ``choice: sample`` draws from."""
    seed: int = 42
    """Seed of ``choice: sample`` and ``max_speaker_items``."""
    contexts_from_dataset: bool = False
    """In an append, allow contexts from the dataset of ``append_to``."""
    unit_seconds: Above0 | None = None
    """Audio per unit of work in seconds; ``null`` derives it from the total."""
    options: dict[str, Any] = field(default_factory=dict)
    """Options of the encoder's family; in a configuration, they are written next to ``encoder``."""

    def __post_init__(self) -> None:
        require(self.min_similarity is None or self.max_similarity is None
                 or self.min_similarity <= self.max_similarity,
                 "max_similarity must not be less than min_similarity")  # fmt: skip
        require(self.max_duration is None or self.max_duration >= self.min_duration,
                 "max_duration must not be less than min_duration")  # fmt: skip
