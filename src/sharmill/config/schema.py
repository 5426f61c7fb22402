"""Typed configuration of one dataset: what belongs to no stage, and the base of the sections of stages.

The string below each key is its documentation: docs/configuration.md is generated from these strings.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Final, Literal, TypeVar

from sharmill.config.references import References
from sharmill.registry import DEFAULT_EXECUTOR, EXECUTORS

Precision = Literal["fp32", "tf32", "bf16"]
Presence = Literal["always", "unless_null", "if_given"]

NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")


def require(condition: bool, message: str) -> None:
    """Raise ValueError with the message unless the condition holds: a value of a key is out of range."""
    if not condition:
        raise ValueError(message)


class StageSection:
    """Base of the keys of a stage, which lie below the kind of the stage in a configuration.

    A subclass is a frozen, keyword-only dataclass. Each item of a list of them has a key ``name`` as well.

    Attributes:
        presence: ``always``; ``unless_null``, which leaves the stage out; or ``if_given``, one or a list of them.
        without: what is made where the key is null, if it may be.
        makes_contexts: with this section, a dataset has contexts.
    """

    presence: ClassVar[Presence] = "if_given"
    without: ClassVar[str] = "a dataset without the stage"
    makes_contexts: ClassVar[bool] = False


Kind = TypeVar("Kind", bound=StageSection)


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
    sources: list[Any]
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
    # Of all stages, by kind: a StageSection, a list of them, or None.
    sections: dict[str, Any] = field(default_factory=dict)
    """Keys of a stage of another package: a mapping, or a list of mappings, each with a ``name``, for as many stages.
    Without the key there is no such stage."""
    executor: Any = field(default_factory=lambda: EXECUTORS.load_class(DEFAULT_EXECUTOR)())
    """Where the stages run: see below."""
    metrics: MetricsConfig = field(default_factory=MetricsConfig)
    """Curves of the run: see below."""
    references: ClassVar[References] = References()  # of an instance, where it was read from a file

    def __post_init__(self) -> None:
        require(bool(NAME.fullmatch(self.name)), f"name {self.name!r} must be letters, digits, '_', '-', '.'")
        # An empty path would be the current folder.
        require(bool(self.run_dir.strip()), "run_dir must not be empty")
        require(bool(self.dataset_dir.strip()), "dataset_dir must not be empty")
        require(self.append_to is None or bool(self.append_to.strip()), "append_to must not be empty")
        require(bool(self.sources), "sources must name at least one manifest")
        # An id that is kept may look like one that is made of a path.
        kept = {source.keeps_ids for source in self.sources}
        require(len(kept) == 1, "keep_ids must be the same for all sources; those without the key keep no ids")
        require(0 <= self.max_reject_fraction <= 1, "max_reject_fraction must be between 0 and 1")

    def all(self, kind: type[Kind]) -> list[Kind]:
        """Return the sections of a class: none, one, or several where the configuration has a list of them."""
        return [one for one in self._sections() if isinstance(one, kind)]

    def find(self, kind: type[Kind]) -> Kind | None:
        """Return the section of a class, or the first of several; None if the configuration has none."""
        return next(iter(self.all(kind)), None)

    def section(self, kind: type[Kind]) -> Kind:
        """Return the section of a class that the configuration has.

        Raises:
            LookupError: it has none, or its key is null.
        """
        if (found := self.find(kind)) is None:
            raise LookupError(f"{self.name} has no section of {kind.__name__}")
        return found

    def with_section(self, section: StageSection) -> Config:
        """Return a copy that has another section in the place of the one of its class."""
        keys = [key for key, one in self.sections.items() if type(one) is type(section)]
        return replace(self, sections=self.sections | dict.fromkeys(keys, section))

    @property
    def has_contexts(self) -> bool:
        """Return True if the dataset is to have contexts."""
        return any(one.makes_contexts for one in self._sections())

    def _sections(self) -> list[StageSection]:
        found = (one if isinstance(one, list) else [one] for one in self.sections.values())
        return [one for several in found for one in several if one is not None]
