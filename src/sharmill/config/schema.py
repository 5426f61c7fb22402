"""Typed configuration of one dataset: what belongs to no stage, the base of the sections of stages, and references.

The string below each key is its documentation: docs/configuration.md is generated from these strings.
"""

import hashlib
import os
import re
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar, Final, Literal, TypeVar, cast

import msgspec

from sharmill.files.cache import Cache
from sharmill.registry import DEFAULT_EXECUTOR, EXECUTORS

Precision = Literal["fp32", "tf32", "bf16"]
Presence = Literal["always", "unless_null", "if_given"]
# Ranges of keys; they are checked where a configuration is read.
Positive = Annotated[int, msgspec.Meta(ge=1)]
NotNegative = Annotated[float, msgspec.Meta(ge=0)]
Above0 = Annotated[float, msgspec.Meta(gt=0)]
Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
# The place of a value in a configuration: ("encode", "codecs", 0, "model").
Place = tuple[str | int, ...]

NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
NAME_RULE: Final = "must start with a letter or digit and have only letters, digits, '_', '-' and '.'"

_VARIABLE: Final = re.compile(r"\$\{\s*oc\.env\s*:\s*([^\s,:{}]+)")
# Shorter values are not looked for in texts that were made of the configuration, which have the same letters by chance.
_MIN_CHARACTERS: Final = 4


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
        alternatives: keys of which only one can be given. One on the command line replaces that of the file.
    """

    presence: ClassVar[Presence] = "if_given"
    without: ClassVar[str] = "a dataset without the stage"
    makes_contexts: ClassVar[bool] = False
    alternatives: ClassVar[Sequence[str]] = ()

    def items(self, kind: str) -> Sequence[Any]:
        """Return the settings of each stage of a kind that these keys make: themselves, or the items of a list in them.

        A stage is called after the ``name`` of its settings, if they have one.
        """
        return (self,)


Kind = TypeVar("Kind", bound=StageSection)
Item = TypeVar("Item")


@dataclass(frozen=True, kw_only=True)
class MetricsConfig:
    """Curves of throughput and rejects, one per rank. A missing package or network never stops a run."""

    wandb_project: str | None = None
    """Weights & Biases project to log to; ``null`` logs nothing."""
    wandb_entity: str | None = None
    """User or team of the project; ``null`` is the default of the account."""
    wandb_name: str | None = None
    """Beginning of the names of the runs there, before stage and rank."""


@dataclass(frozen=True)
class References:
    """References of one configuration to the environment: what is stored of a run has them as they were written.

    The values may be secrets. They are used, and handed to ranks, but the stored configuration, the identities of plans
    and the index of a dataset name the variable instead.

    Args:
        written: values by their place in the configuration, ``("encode", "codecs", 0, "model")``, as they were written.
        variables: for each value that the environment gave, the name of its variable.
    """

    written: Mapping[Place, str] = field(default_factory=dict)
    variables: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, values: Any) -> "References":
        """Return the references in the values of a YAML file that are not resolved yet."""
        written = _references_in(values)
        if not _named(written.values(), unset=True):
            return cls()
        return cls(written=written, variables=_named(written.values()))

    @classmethod
    def unresolved(cls, values: Any) -> tuple[Any, "References"]:
        """Return values that are not resolved, fit to be shown, and the references that were in them, of any kind.

        Names and paths become the texts of their references, other keys get their defaults.
        """
        written = _references_in(values)

        def to_words(place: Place, value: Any) -> Any:
            return "_".join(re.findall(r"[\w.-]+", value.replace("oc.env:", ""))) if place in written else value

        optional = {
            place
            for place in written
            if isinstance(place[-1], str) and place[-1] not in ("name", "run_dir", "dataset_dir", "model")
        }
        return _walk(values, to_words, without=optional), cls(written=written)

    def put_back(self, values: Any) -> Any:
        """Return the resolved values of a configuration with the references in their places again."""
        return _walk(values, self.written.get, whole=self.written)

    def identify(self, identity: dict[str, Any], section: str) -> dict[str, Any]:
        """Return the identity of a stage's plan without values of the environment.

        Its keys are those of the whole configuration, or of the section. Values at the place of a reference are as they
        were written, of whatever length and type they are; in others, which may be made of several keys, the values of
        variables are looked for. A part of the SHA-256 of each stands behind it, by which a change is noticed.
        """
        if not self.written:
            return identity

        def with_digests(place: Place, value: Any) -> Any:
            # A folder has several texts in an identity.
            if (written := self.written.get(place)) is None:
                return value
            return _walk(value, lambda _, text: None if text is None else f"{written}#{_digest(str(text))}")

        for place in ((), (section,)):
            identity = _walk(identity, with_digests, place, whole=self.written)
        return cast("dict[str, Any]", _hide(identity, _searchable(self.variables), digests=True))

    def hide(self, value: Any) -> Any:
        """Return JSON values in which variables stand for what they are set to, where that has four characters or more.

        >>> References(variables={"/secret": "MODELS"}).hide({"model": "/secret/mimi"})
        {'model': '${oc.env:MODELS}/mimi'}
        """
        return _hide(value, _searchable(self.variables), digests=False)

    def hide_at(self, place: Place, text: str) -> str:
        """Return a text that was made of the value at a place with its variables in it, however short their values."""
        written = self.written.get(place)
        return text if written is None else _hide(text, _named([written]), digests=False)


def _references_in(values: Any) -> dict[Place, str]:
    """Return the texts of plain values that have references in them, by their places."""
    texts: dict[Place, Any] = {}
    _walk(values, texts.setdefault)
    return {place: text for place, text in texts.items() if isinstance(text, str) and "${" in text}


def _walk(
    value: Any, change: Callable[[Place, Any], Any], place: Place = (), *, whole: Container[Place] = (),
    without: Container[Place] = (),
) -> Any:  # fmt: skip
    """Return plain values, each replaced by what ``change`` returns of its place and itself.

    Args:
        place: that of ``value``.
        whole: places at which a list or a mapping is one value.
        without: places of keys that are left out.
    """
    if isinstance(value, dict) and place not in whole:
        kept = {key: (child, (*place, key)) for key, child in value.items() if (*place, key) not in without}
        return {key: _walk(child, change, at, whole=whole, without=without) for key, (child, at) in kept.items()}
    if isinstance(value, list | tuple) and place not in whole:
        return [_walk(child, change, (*place, n), whole=whole, without=without) for n, child in enumerate(value)]
    return change(place, value)


def _named(texts: Iterable[str], *, unset: bool = False) -> dict[str, str]:
    """Return the names of the variables in texts by their values; ``unset`` adds those that have none."""
    names = sorted({name for text in texts for name in _VARIABLE.findall(text)}, reverse=True)
    return {os.environ.get(name, ""): name for name in names if os.environ.get(name) or unset}


def _searchable(variables: Mapping[str, str]) -> dict[str, str]:
    return {value: name for value, name in variables.items() if len(value) >= _MIN_CHARACTERS}


def _hide(value: Any, variables: Mapping[str, str], *, digests: bool) -> Any:
    if not variables:
        return value
    if isinstance(value, dict):
        return {_hide(k, variables, digests=digests): _hide(v, variables, digests=digests) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_hide(child, variables, digests=digests) for child in value]
    if not isinstance(value, str):
        return value

    def name(match: re.Match[str]) -> str:
        return f"${{oc.env:{variables[match[0]]}}}" + (f"#{_digest(match[0])}" if digests else "")

    longest_first = sorted(variables, key=len, reverse=True)
    return re.sub("|".join(map(re.escape, longest_first)), name, value)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()[:12]


@dataclass(frozen=True, kw_only=True)
class Config:
    """One dataset, from its manifests to its shards."""

    name: str
    """Name of the dataset: letters, digits, ``_``, ``-`` and ``.``."""
    run_dir: str
    """Run directory: plans, ledgers, logs, progress, rejects and intermediate manifests."""
    dataset_dir: str
    """Dataset directory: the finished Shar. Neither directory may lie within the other."""
    sources: list[Any] = field(default_factory=list)
    """Inputs, in order. ``type`` names the kind of each; the other keys belong to the kind. Only ``prepare`` needs
    them: ``encode`` and ``validate`` of a Shar that is there do without."""
    speaker_key: str = "speaker"
    """Rule that makes speaker groups: a preset (``speaker``, ``librispeech``, ``libritts``,
    ``librittsDevClean``, ``hifitts``, ``hifitts2``, ``nvyt2505``, ``rivaLindyRodney``, ``rivaEmmaMeganSeanTom``,
    ``jhsdGtc20Amp20Keynote``, ``all``), or a regular expression with named groups that is searched in
    ``audio_filepath``, such as ``'^(?P<speaker>[^/]+)/(?P<session>[^/]+)/'``. ``speaker`` and patterns
    take names as they are (``S1`` and ``s1`` are two speakers); the other presets are published rules, which fold
    case."""
    append_to: str | None = None
    """Finished dataset that ``sharmill append`` adds the new shards to. Records that it has are rejected as
    ``already_there``, which does not count for ``max_reject_fraction``."""
    max_reject_fraction: Share = 0.5
    """Stop a stage when more than this fraction of its records is rejected."""
    cache_dir: str | None = None
    """Folder for copies of what URLs name, best on a node's own disk: a new or empty one, or a cache of another run;
    ``null``: in the run directory."""
    cache_gib: Above0 = 100.0
    """Limit of that folder in GiB; what was used longest ago goes first."""
    # The sections of all stages, by kind: a StageSection, a list of them, or None.
    sections: dict[str, Any] = field(default_factory=dict)
    """Keys of a stage of another package: a mapping, or a list of mappings, each with a ``name``, for as many stages.
    Without the key there is no such stage."""
    executor: Any = field(default_factory=lambda: EXECUTORS.load_class(DEFAULT_EXECUTOR)())
    """Where the stages run: see below."""
    metrics: MetricsConfig = field(default_factory=MetricsConfig)
    """Curves of the run: see below."""
    # No key: it is not written, and does not count in a comparison.
    references: References = field(default_factory=References, compare=False, repr=False, metadata={"is_key": False})

    def __post_init__(self) -> None:
        require(bool(NAME.fullmatch(self.name)), f"name {self.name!r} {NAME_RULE}")
        # An empty path would be the current folder.
        require(bool(self.run_dir.strip()), "run_dir must not be empty")
        require(bool(self.dataset_dir.strip()), "dataset_dir must not be empty")
        require(self.append_to is None or bool(self.append_to.strip()), "append_to must not be empty")
        object.__setattr__(self, "sources", [source.with_cache(self.cache) for source in self.sources])
        # An id that is kept may look like one that is made of a path.
        require(len({source.keeps_ids for source in self.sources}) <= 1,
                "keep_ids must be the same for all sources; those without the key keep no ids")  # fmt: skip

    def items(self, kind: type[Item]) -> list[Item]:
        """Return the items of a class in lists that sections have, such as the codecs."""
        lists = [value for one in self._sections() for value in vars(one).values() if isinstance(value, list)]
        return [item for found in lists for item in found if isinstance(item, kind)]

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

    def with_section(self, section: StageSection) -> "Config":
        """Return a copy that has another section in the place of the one of its class."""
        keys = [key for key, one in self.sections.items() if type(one) is type(section)]
        return replace(self, sections=self.sections | dict.fromkeys(keys, section))

    @property
    def cache(self) -> Cache:
        """The copies of what URLs name."""
        return Cache.of_run(self.run_dir, self.cache_dir, self.cache_gib)

    @property
    def has_contexts(self) -> bool:
        """Return True if the dataset is to have contexts."""
        return any(one.makes_contexts for one in self._sections())

    def _sections(self) -> list[StageSection]:
        found = (one if isinstance(one, list) else [one] for one in self.sections.values())
        return [one for several in found for one in several if one is not None]
