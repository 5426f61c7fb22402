"""Typed configuration of one dataset: one frozen dataclass per section, checked when it is made.

The string below each key is its documentation: docs/configuration.md is generated from these strings.
"""

from __future__ import annotations

import math
import re
from abc import ABC
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from sharmill.config.references import References
from sharmill.registry import CODECS, ENCODERS

if TYPE_CHECKING:
    from sharmill.sources import Source
else:

    class Source(ABC):
        """Stand-in for the class of all sources, which a configuration has from the registry."""

        type: str
        audio_root: str | list[str] | None


Precision = Literal["fp32", "tf32", "bf16"]

STAGES = ("prepare", "match", "write", "survey", "encode", "assemble", "validate")
STAGE_ALIASES = {"stage1": "match", "stage2": "write", "stage3": "encode"}

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
_DEFAULT_SHARD_SIZE = 1000


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


@dataclass(frozen=True, kw_only=True)
class PrepareConfig:
    """Conditions that a record must meet. Records that do not are rejected with a reason."""

    min_duration: float = 0.1
    """Shortest utterance, in seconds."""
    max_duration: float | None = 600.0
    """Longest utterance, in seconds; ``null`` is no limit. A codec takes an utterance at once, and one of three hours
    needs more than 20 GB of memory."""
    duration_tolerance: float = 0.1
    """Largest difference between the durations in the manifest and in the audio header, in seconds."""
    require_text: bool = True
    """Reject records without text. ``false`` keeps untranscribed speech."""
    filters: dict[str, str] = field(default_factory=dict)
    """Comparisons of manifest keys with numbers, such as ``{cer: "<= 0.03", bandwidth: ">= 8000"}``."""
    unit_records: int = 2000
    """Number of records in one unit of work."""

    def __post_init__(self) -> None:
        _require(self.min_duration >= 0, "min_duration must not be negative")
        _require(self.max_duration is None or self.max_duration > self.min_duration,
                 "max_duration must be greater than min_duration")  # fmt: skip
        _require(self.duration_tolerance >= 0, "duration_tolerance must not be negative")
        _require(self.unit_records > 0, "unit_records must be positive")


@dataclass(frozen=True, kw_only=True)
class MatchConfig:
    """Choice of the context: the most similar utterance of the same speaker group that meets these conditions."""

    encoder: str = "resemblyzer"
    """Speaker encoder: ``resemblyzer`` (its weights come with the Python package), ``nemo:titanet_large`` or another
    pretrained name, or ``nemo:/path/model.nemo``."""
    min_similarity: float | None = None
    """Lowest cosine similarity of a context to its target. ``null`` is the encoder's own: 0.75 for ``resemblyzer``, 0.6
    for TitaNet; any other encoder needs a number here."""
    max_similarity: float | None = None
    """Highest cosine similarity of a context to its target, against copies that are stored with loss or otherwise
    processed, such as 0.99; ``null`` is no limit. Copies with the same samples are never a context; a copy at another
    sampling rate has other samples before ``write.sampling_rate`` makes the rates equal, and needs this limit."""
    min_duration: float = 3.0
    """Shortest context, in seconds."""
    max_duration: float | None = None
    """Longest context, in seconds; ``null`` is no limit."""
    batch_seconds: float = 60.0
    """Audio in one batch of the encoder, in seconds, padding included. On a CPU no batch has more than 16 s."""
    precision: Precision = "fp32"
    """Arithmetic of the encoder: ``fp32``; ``tf32``, which GPUs from compute capability 8.0 on have and CPUs have not;
    or ``bf16``, torch's autocast, on these GPUs and on CPUs. Similarities differ a little, and with them some choices.
    """
    resampling: Literal["soxr", "kaiser", "sinc"] = "soxr"
    """Resampling of audio to the rate of the encoder: ``soxr`` is libsoxr at high quality, as in the published scripts
    (librosa's ``soxr_hq``); ``kaiser`` torchaudio's with a Kaiser window and 64 zero crossings; ``sinc`` torchaudio's
    default, which is less exact near the highest frequencies. What is stored or encoded is resampled as Lhotse does."""
    max_group: int | None = None
    """Split speaker groups with more utterances than this into parts, so that a corpus of few speakers uses every rank.
    A context then comes from the same part. ``null`` splits nothing."""
    exclude_same_text: bool = False
    """Leave out candidates that have the target's text."""
    max_text_overlap: float | None = None
    """Leave out candidates that share more than this part of their words with the target, such as 0.5: distinct words
    in common over those of the text that has fewer; ``null`` is no limit."""
    max_speaker_items: int | None = None
    """Choose the contexts of a speaker group from a random pool of so many of its utterances, drawn by ``seed``;
    ``null`` is all of them."""
    contexts: Literal["choose", "given"] = "choose"
    """``given`` keeps the contexts of a manifest that has been extended already (``context_audio_filepath`` and the
    further keys): each is checked, what it leaves out is filled in, and one that cannot be used, or is outside the
    limits above, makes its record a reject (``bad_context``). Records without one get theirs as by ``choose``."""
    choice: Literal["best", "sample"] = "best"
    """``best`` takes the most similar candidate. ``sample`` draws among the ``sample_size`` most similar, so that a
    popular clip does not become the context of everything."""
    sample_size: int = 5
    """Number of candidates that ``choice: sample`` draws from."""
    seed: int = 42
    """Seed of ``choice: sample`` and ``max_speaker_items``."""
    contexts_from_dataset: bool = False
    """Of an append: contexts may also come from the dataset of ``append_to``. The voices of its cuts that are of the
    same speaker groups as new records are embedded once more, from the audio that is stored there."""
    unit_seconds: float | None = None
    """Audio that one unit of work gathers, in seconds; ``null`` derives it from the total."""
    options: dict[str, Any] = field(default_factory=dict)
    """Options of the encoder's family, which a configuration has beside ``encoder``."""

    options_of: ClassVar = (ENCODERS, "encoder")

    def __post_init__(self) -> None:
        _require(self.min_similarity is None or -1 <= self.min_similarity <= 1,
                 "min_similarity must be between -1 and 1")  # fmt: skip
        _require(self.max_similarity is None or -1 <= self.max_similarity <= 1,
                 "max_similarity must be between -1 and 1")  # fmt: skip
        _require(self.min_similarity is None or self.max_similarity is None
                 or self.min_similarity <= self.max_similarity,
                 "max_similarity must not be less than min_similarity")  # fmt: skip
        _require(self.min_duration >= 0, "min_duration must not be negative")
        _require(self.max_duration is None or self.max_duration >= self.min_duration,
                 "max_duration must not be less than min_duration")  # fmt: skip
        _require(self.batch_seconds > 0, "batch_seconds must be positive")
        # With 2, a group of odd size would leave an utterance alone.
        _require(self.max_group is None or self.max_group >= 3, "max_group must be at least 3")
        _require(self.max_text_overlap is None or 0 <= self.max_text_overlap <= 1,
                 "max_text_overlap must be between 0 and 1")  # fmt: skip
        _require(self.max_speaker_items is None or self.max_speaker_items >= 2, "max_speaker_items must be at least 2")
        _require(self.sample_size >= 1, "sample_size must be at least 1")
        _require(self.unit_seconds is None or self.unit_seconds > 0, "unit_seconds must be positive")


@dataclass(frozen=True, kw_only=True)
class WriteConfig:
    """Form of the shards: their size, their order and the format of their audio."""

    shard_size: int | None = None
    """Number of cuts in one shard; 1000 where neither this nor one of the next two keys is given. Of the three keys one
    can be given: on the command line, ``write.shard_size=null write.num_shards=64`` replaces the one in the file."""
    num_shards: int | None = None
    """Number of shards. Their numbers of cuts differ by one at most; there are never more shards than cuts."""
    shard_seconds: float | None = None
    """Target audio in one shard, in seconds, about: the number of shards is the total divided by this, rounded, and
    each shard ends where the sum so far is closest to its share. Equal hours are what training balances on."""
    audio_format: Literal["flac", "wav", "mp3", "opus", "original"] = "flac"
    """Format of the stored audio; ``original`` is that of each source file (FLAC where it cannot be written). A record
    that is a whole mono file in this format and at ``sampling_rate`` is copied byte for byte. Opus and MP3 are written
    at the variable bit rates of libsndfile, which cannot be changed: for speech at 16, 24 and 48 kHz about 28, 37 and
    62 kbit/s (Opus) and 43, 55 and 68 kbit/s (MP3)."""
    sampling_rate: int | None = None
    """Sampling rate of the stored audio, in Hz; ``null`` keeps the rate of each recording."""
    order: Literal["manifest", "speaker", "shuffle"] = "shuffle"
    """Order of the cuts: as in the manifest, by speaker group (by speaker where ``match`` is null), or shuffled by
    ``seed``."""
    seed: int = 42
    """Seed of ``order: shuffle``."""

    def __post_init__(self) -> None:
        sizes = {name: getattr(self, name) for name in ("shard_size", "num_shards", "shard_seconds")}
        given = {name: value for name, value in sizes.items() if value is not None}
        for name, value in given.items():
            _require(0 < value < math.inf, f"{name} must be a positive number")
        named = " and ".join(f"{name} ({value:g})" for name, value in given.items())
        _require(len(given) < 2, f"{named} are given, and only one of them can be: set the others to null")
        if not given:
            object.__setattr__(self, "shard_size", _DEFAULT_SHARD_SIZE)
        _require(self.sampling_rate is None or self.sampling_rate > 0, "sampling_rate must be positive")
        _require(self.seed >= 0, "seed must not be negative")


@dataclass(frozen=True, kw_only=True)
class CodecConfig:
    """One codec whose codes the dataset has."""

    name: str
    """Name of the codes in the dataset: they lie in the folder ``codes_<name>``."""
    model: str
    """Model to load: ``nemo:<pretrained name or .nemo file>``, ``transformers:<directory or hub name>`` (EnCodec
    without chunks, DAC, Mimi), or ``builtin``, a small one that ships with sharmill, for trying out."""

    options: dict[str, Any] = field(default_factory=dict)
    """Options of the model's family, which a configuration has beside ``model``."""

    options_of: ClassVar = (CODECS, "model")

    def __post_init__(self) -> None:
        _require(
            bool(_NAME.fullmatch(self.name)),
            f"codec name {self.name!r} must be letters, digits, '_', '-', '.'",
        )


@dataclass(frozen=True, kw_only=True)
class EncodeConfig:
    """Codecs whose codes the dataset has, side by side."""

    codecs: list[CodecConfig] = field(default_factory=lambda: [CodecConfig(name="builtin", model="builtin")])
    """List of codecs; each has the keys below."""
    batch_seconds: float = 30.0
    """Audio in one batch of a codec, in seconds, padding included. On a CPU no batch has more than 10 s."""
    precision: Precision = "fp32"
    """Arithmetic of the codecs, as for ``match``. Any but ``fp32`` changes codes; ``dataset.json`` names it."""

    canonical_shapes: bool = False
    """Pad every segment to one of a few lengths, in batches of one size for each, so that its codes do not depend on
    its neighbours; on a GPU the last batch of each length is filled up with silence. Codecs whose codes depend on
    padding take segments one by one."""
    unit_seconds: float | None = None
    """Audio in one unit of work, in seconds; ``null`` chooses for about 64 units, between 60 s and two hours each."""

    def __post_init__(self) -> None:
        _require(self.batch_seconds > 0, "batch_seconds must be positive")
        _require(self.unit_seconds is None or self.unit_seconds > 0, "unit_seconds must be positive or null")
        names = [codec.name for codec in self.codecs]
        _require(len(set(names)) == len(names), "two codecs have the same name")


@dataclass(frozen=True, kw_only=True)
class ValidateConfig:
    """Checks beyond those that the stage ``validate`` always makes."""

    deep: bool = False
    """Decode all audio as well."""
    recheck_codes: float | str = 0.0
    """Share of the segments to encode again, such as ``0.001`` or ``0.1%``."""
    codec_models: dict[str, str] = field(default_factory=dict)
    """Model of each codec, where it is not the one that made the codes: ``{nano: "nemo:/new/place/model.nemo"}``."""
    against_sources: bool = False
    """Account for every record of the sources: each is in the dataset or among the rejects."""

    def __post_init__(self) -> None:
        _require(0 <= self.recheck_share <= 1, "recheck_codes must be a share between 0 and 1, or a percentage")

    @property
    def recheck_share(self) -> float:
        """``recheck_codes`` as a number; -1 where it is none."""
        text = str(self.recheck_codes).strip()
        try:
            return float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
        except ValueError:
            return -1.0


@dataclass(frozen=True, kw_only=True)
class ExecutorConfig:
    """Place where the stages run. SLURM has no key here: `sharmill submit` takes a cluster profile."""

    kind: Literal["local", "ray"] = "local"
    """``local``: processes on this machine. ``ray``: actors on a Ray cluster."""
    workers: int | Literal["auto"] = "auto"
    """Number of ranks. ``auto``: one per visible GPU for match and encode where there are any, else one per core. ``1``
    on the CPU runs inside the process, so that a debugger works."""
    address: str = "auto"
    """Address of the Ray cluster (``kind: ray``)."""
    cores: int = 1
    """Cores set aside for each rank (``kind: ray``)."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of match and encode. ``auto``: a GPU for each rank where there are any; a job that was given GPUs and
    finds none is refused. ``cuda``: GPUs or nothing; on Ray, wait for GPU nodes. ``cpu``: no GPU is touched."""
    unit_time_limit: float | Literal["auto"] | None = "auto"
    """Seconds that an attempt at a unit may take, on SLURM too; a rank that takes longer is ended with a traceback in
    its log and replaced, and the attempt has failed. ``auto``: ten seconds for each second of audio or record of the
    unit, and an hour at least; none where ``workers: 1`` runs inside the process, which a number of seconds prevents.
    ``null``: no limit."""
    scratch: str | None = None
    """Folder on a disk of each node, such as ``$TMPDIR`` (its value on the node counts): there ranks write the files of
    a unit, on SLURM too, before they copy them beside the dataset. ``null``: they write beside it at once."""
    seconds_until_seen: float = 60.0
    """Seconds until every node sees what another has written, on SLURM and Ray: so long is waited, where need be, for
    files that others have made. 60 is the longest that NFS keeps names by its defaults (``acdirmax``). File systems
    that are coherent, as Lustre, GPFS and CephFS are, need none: 0."""

    least_seconds_per_rank: float | None = None
    """Least predicted work of a rank on SLURM, in seconds: no more ranks are submitted than have so much, where the
    pace of the stage is known by a pilot (`sharmill calibrate`) or by what is done. ``null``: four times what starting
    a rank and loading its model took in the pilot. ``0``: as many ranks as the profile allows."""

    def __post_init__(self) -> None:
        _require((self.least_seconds_per_rank or 0.0) >= 0, "least_seconds_per_rank must not be negative")
        _require(self.workers == "auto" or int(self.workers) >= 1, "workers must be 'auto' or a number from 1")
        _require(self.cores >= 1, "cores must be at least 1")
        limit = self.unit_time_limit
        _require(limit in (None, "auto") or float(limit) > 0, "unit_time_limit must be positive, auto or null")
        _require(self.seconds_until_seen >= 0, "seconds_until_seen must not be negative")
        _require(self.kind == "ray" or (self.address, self.cores) == ("auto", 1), "address and cores are for kind: ray")


@dataclass(frozen=True, kw_only=True)
class MetricsConfig:
    """Curves of throughput and rejects, one per rank. A missing package or network never stops a run."""

    wandb_project: str | None = None
    """Weights & Biases project to log to; ``null`` logs nothing."""
    wandb_entity: str | None = None
    """User or team of the project; ``null`` is the default of the account."""
    wandb_name: str | None = None
    """Beginning of the names of the runs there, before stage and rank."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """One dataset, from its manifests to its shards."""

    name: str
    """Name of the dataset: letters, digits, ``_``, ``-`` and ``.``."""
    run_dir: str
    """Run directory: plans, ledgers, logs, progress, rejects and intermediate manifests."""
    dataset_dir: str
    """Dataset directory: the finished Shar. Neither directory may lie within the other."""
    sources: list[Source]
    """Inputs, in order. ``type`` names the kind of each; the other keys belong to the kind."""
    speaker_key: str = "speaker"
    """Rule that makes speaker groups, among whose members contexts are chosen. A preset (``speaker``, ``librispeech``,
    ``libritts``, ``hifitts``, ``hifitts2``, ``nvyt2505``, ``rivaLindyRodney``, ``rivaEmmaMeganSeanTom``,
    ``jhsdGtc20Amp20Keynote``, ``all``), or a regular expression with named groups that is searched in
    ``audio_filepath``, such as ``'^(?P<speaker>[^/]+)/(?P<session>[^/]+)/'``. ``speaker`` and patterns
    take names as they are (``S1`` and ``s1`` are two speakers). The other presets are published rules, which fold
    case. Not used where ``match`` is null."""
    append_to: str | None = None
    """Finished dataset that ``sharmill append`` adds the new shards to. Records that it has are rejected as
    ``already_there``, which does not count for ``max_reject_fraction``."""
    max_reject_fraction: float = 0.5
    """Stop a stage when more than this fraction of its records is rejected."""
    prepare: PrepareConfig = field(default_factory=PrepareConfig)
    """Stage prepare: see below."""
    match: MatchConfig | None = field(default_factory=MatchConfig)
    """Stage match: see below. ``null`` makes a dataset without contexts: of cuts, target audio and target codes, with
    all stages but match. Records need no speaker then."""
    write: WriteConfig = field(default_factory=WriteConfig)
    """Stage write: see below."""
    encode: EncodeConfig = field(default_factory=EncodeConfig)
    """Stage encode: see below."""
    validate: ValidateConfig = field(default_factory=ValidateConfig)
    """Stage validate: see below."""
    executor: ExecutorConfig = field(default_factory=ExecutorConfig)
    """Where the stages run: see below."""
    metrics: MetricsConfig = field(default_factory=MetricsConfig)
    """Curves of the run: see below."""
    references: ClassVar[References] = References()  # of an instance, where it was read from a file

    def __post_init__(self) -> None:
        _require(bool(_NAME.fullmatch(self.name)), f"name {self.name!r} must be letters, digits, '_', '-', '.'")
        # An empty path would be the current folder.
        _require(bool(self.run_dir.strip()), "run_dir must not be empty")
        _require(bool(self.dataset_dir.strip()), "dataset_dir must not be empty")
        _require(self.append_to is None or bool(self.append_to.strip()), "append_to must not be empty")
        from_dataset = self.match is not None and self.match.contexts_from_dataset
        _require(not from_dataset or self.append_to is not None, "match.contexts_from_dataset needs append_to")
        _require(bool(self.sources), "sources must name at least one manifest")
        # An id that is kept may look like one that is made of a path.
        kept = {source.keeps_ids for source in self.sources}
        _require(len(kept) == 1, "keep_ids must be the same for all sources; those without the key keep no ids")
        _require(0 <= self.max_reject_fraction <= 1, "max_reject_fraction must be between 0 and 1")

    @property
    def has_contexts(self) -> bool:
        """Return True if the dataset is to have contexts."""
        return self.match is not None

    @property
    def stages(self) -> tuple[str, ...]:
        """The names of the stages of this dataset, in the order in which they run."""
        return tuple(name for name in STAGES if name != "match" or self.has_contexts)
