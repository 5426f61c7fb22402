"""Typed configuration of one dataset: general keys, the base class of stage sections, and environment references.

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
# Value ranges, which are checked when a configuration is read.
Positive = Annotated[int, msgspec.Meta(ge=1)]
NotNegative = Annotated[float, msgspec.Meta(ge=0)]
Above0 = Annotated[float, msgspec.Meta(gt=0)]
Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
# Path of a value in a configuration, such as ("encode", "codecs", 0, "model").
Place = tuple[str | int, ...]

NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
NAME_RULE: Final = "must start with a letter or digit and contain only letters, digits, '_', '-' and '.'"

_VARIABLE: Final = re.compile(r"\$\{\s*oc\.env\s*:\s*([^\s,:{}]+)")
# A variable's value is replaced in strings derived from the configuration only if it has at least this length, because
# shorter values may occur in them by chance.
_MIN_CHARACTERS: Final = 4


def require(condition: bool, message: str) -> None:
    """Raise ValueError with a message about a wrong value of a key, unless the condition holds."""
    if not condition:
        raise ValueError(message)


class StageSection:
    """Base class for the configuration section of a stage, whose key is the kind of the stage.

    A subclass is a frozen, keyword-only dataclass. If the section is a list, each item also has a key ``name``.

    Attributes:
        presence: ``always``: the stage always exists; ``unless_null``: the stage is left out if the section is null;
            ``if_given``: the section is optional, and may be a list with an item per stage.
        without: description of the result if the section is null.
        makes_contexts: with this section, the dataset has contexts.
        alternatives: mutually exclusive keys. An override of one of them replaces another one in the file.
    """

    presence: ClassVar[Presence] = "if_given"
    without: ClassVar[str] = "a dataset without the stage"
    makes_contexts: ClassVar[bool] = False
    alternatives: ClassVar[Sequence[str]] = ()

    def items(self, kind: str) -> Sequence[Any]:
        """Return the settings of each stage of a kind: this section itself, or the items of a list in it.

        If the settings have a ``name``, it becomes part of the stage's name.
        """
        return (self,)

    def prepared_key(self, speaker_key: str) -> str | None:
        """Return the ``speaker_key`` by which ``prepare`` groups the records if this stage names the speakers.

        None means that the stage names no speakers. By default it does not.
        """
        return None


Kind = TypeVar("Kind", bound=StageSection)
Item = TypeVar("Item")


@dataclass(frozen=True, kw_only=True)
class MetricsConfig:
    """Live curves of throughput and rejects, one per rank. A missing package or network never stops a run."""

    wandb_project: str | None = None
    """Weights & Biases project to log to; ``null`` logs nothing."""
    wandb_entity: str | None = None
    """User or team that owns the project; ``null`` uses the default of the account."""
    wandb_name: str | None = None
    """Prefix of the names of the W&B runs, followed by stage and rank."""


@dataclass(frozen=True)
class References:
    """References of a configuration to environment variables. They are stored in place of the variables' values.

    The values may be secrets. Ranks receive and use them, but the stored configuration, the identities of plans and the
    index of a dataset contain the names of the variables instead.

    Args:
        written: the original strings of values with references, by path, such as ``("encode", "codecs", 0, "model")``.
        variables: names of variables by their values.
    """

    written: Mapping[Place, str] = field(default_factory=dict)
    variables: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def from_values(cls, values: Any) -> "References":
        """Return the references in the unresolved values of a YAML file."""
        written = _references_in(values)
        if not _named(written.values(), unset=True):
            return cls()
        return cls(written=written, variables=_named(written.values()))

    @classmethod
    def unresolved(cls, values: Any) -> tuple[Any, "References"]:
        """Return values for display in which references are not resolved, and the references.

        Names and paths are replaced with the text of their references. All other keys with references are dropped and
        get their defaults.
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
        """Return the resolved values of a configuration with the original references restored."""
        return _walk(values, self.written.get, whole=self.written)

    def identify(self, identity: dict[str, Any], section: str) -> dict[str, Any]:
        """Return the identity of a stage's plan without values of environment variables.

        A value at the path of a reference is replaced with its original string. Paths are relative to the whole
        configuration or to the section. In all other strings, which may be derived from several keys, the values of
        variables are replaced with their names. A part of the SHA-256 digest of the value is appended, so that a
        changed value changes the identity.
        """
        if not self.written:
            return identity

        def with_digests(place: Place, value: Any) -> Any:
            # An identity may represent a folder by several strings.
            if (written := self.written.get(place)) is None:
                return value
            return _walk(value, lambda _, text: None if text is None else f"{written}#{_digest(str(text))}")

        for place in ((), (section,)):
            identity = _walk(identity, with_digests, place, whole=self.written)
        return cast("dict[str, Any]", _hide(identity, _searchable(self.variables), digests=True))

    def hide(self, value: Any) -> Any:
        """Return JSON values in which values of variables with at least four characters are replaced with their names.

        >>> References(variables={"/secret": "MODELS"}).hide({"model": "/secret/mimi"})
        {'model': '${oc.env:MODELS}/mimi'}
        """
        return _hide(value, _searchable(self.variables), digests=False)

    def hide_at(self, place: Place, text: str) -> str:
        """Return a string derived from the value at a path, with the names of variables instead of their values."""
        written = self.written.get(place)
        return text if written is None else _hide(text, _named([written]), digests=False)


def _references_in(values: Any) -> dict[Place, str]:
    """Return the strings with references in plain values, by their paths."""
    texts: dict[Place, Any] = {}
    _walk(values, texts.setdefault)
    return {place: text for place, text in texts.items() if isinstance(text, str) and "${" in text}


def _walk(
    value: Any, change: Callable[[Place, Any], Any], place: Place = (), *, whole: Container[Place] = (),
    without: Container[Place] = (),
) -> Any:  # fmt: skip
    """Return a copy of plain values in which each leaf is replaced by ``change(path, leaf)``.

    Args:
        place: path of ``value``.
        whole: paths of lists and mappings that are treated as leaves.
        without: paths of keys to leave out.
    """
    if isinstance(value, dict) and place not in whole:
        kept = {key: (child, (*place, key)) for key, child in value.items() if (*place, key) not in without}
        return {key: _walk(child, change, at, whole=whole, without=without) for key, (child, at) in kept.items()}
    if isinstance(value, list | tuple) and place not in whole:
        return [_walk(child, change, (*place, n), whole=whole, without=without) for n, child in enumerate(value)]
    return change(place, value)


def _named(texts: Iterable[str], *, unset: bool = False) -> dict[str, str]:
    """Return the names of the variables in strings, by value; with ``unset``, include variables without a value."""
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
    """Configuration of one dataset, from its manifests to its shards."""

    name: str
    """Name of the dataset; letters, digits, ``_``, ``-`` and ``.``."""
    run_dir: str
    """Run directory for plans, ledgers, logs, progress, rejects and intermediate manifests."""
    dataset_dir: str
    """Dataset directory for the finished Shar. Neither directory may be inside the other."""
    sources: list[Any] = field(default_factory=list)
    """Inputs, in order. ``type`` selects the kind of an input; the other keys depend on it. Only ``prepare`` needs
    sources: ``encode`` and ``validate`` can work on an existing Shar."""
    speaker_key: str = "speaker"
    """Rule that determines speaker groups: a preset (``speaker``, ``librispeech``, ``libritts``, ``librittsDevClean``,
    ``hifitts``, ``hifitts2``, ``nvyt2505``, ``rivaLindyRodney``, ``rivaEmmaMeganSeanTom``, ``jhsdGtc20Amp20Keynote``,
    ``all``), or a regular expression with named groups that is searched for in ``audio_filepath``, such as
    ``'^(?P<speaker>[^/]+)/(?P<session>[^/]+)/'``. ``speaker`` and regular expressions are case-sensitive; the other
    presets are published rules that ignore case."""
    append_to: str | None = None
    """Finished dataset that ``sharmill append`` adds the new shards to."""
    max_reject_fraction: Share = 0.5
    """Stop a stage if more than this fraction of its records is rejected."""
    cache_dir: str | None = None
    """Folder for copies of files behind URLs, preferably on a node's local disk. It must be new, empty, or the cache of
    another run; ``null`` uses a folder in the run directory."""
    cache_gib: Above0 = 100.0
    """Maximum size of the cache folder in GiB; the least recently used files are removed first."""
    # The sections of all stages, by kind: a StageSection, a list of them, or None.
    sections: dict[str, Any] = field(default_factory=dict)
    """Section of a stage from another package: a mapping, or a list of mappings, one per stage, each with a ``name``.
    Without this key, the stage is omitted."""
    executor: Any = field(default_factory=lambda: EXECUTORS.load_class(DEFAULT_EXECUTOR)())
    """Executor that runs the stages: see below."""
    metrics: MetricsConfig = field(default_factory=MetricsConfig)
    """Live curves of the run: see below."""
    # This is not a configuration key: it is neither written to a file nor compared.
    references: References = field(default_factory=References, compare=False, repr=False, metadata={"is_key": False})

    def __post_init__(self) -> None:
        require(bool(NAME.fullmatch(self.name)), f"name {self.name!r} {NAME_RULE}")
        # An empty path would mean the current folder.
        require(bool(self.run_dir.strip()), "run_dir must not be empty")
        require(bool(self.dataset_dir.strip()), "dataset_dir must not be empty")
        require(self.append_to is None or bool(self.append_to.strip()), "append_to must not be empty")
        object.__setattr__(self, "sources", [source.with_cache(self.cache) for source in self.sources])
        # A kept id could equal an id that is derived from a path.
        require(len({source.keeps_ids for source in self.sources}) <= 1,
                "keep_ids must be the same for all sources; without the key, a source keeps no ids")  # fmt: skip

    def items(self, kind: type[Item]) -> list[Item]:
        """Return the items of a class from all lists in the sections, such as the codecs."""
        lists = [value for one in self._sections() for value in vars(one).values() if isinstance(value, list)]
        return [item for found in lists for item in found if isinstance(item, kind)]

    def all(self, kind: type[Kind]) -> list[Kind]:
        """Return all sections of a class: none, one, or several if the configuration has a list of them."""
        return [one for one in self._sections() if isinstance(one, kind)]

    def find(self, kind: type[Kind]) -> Kind | None:
        """Return the section of a class, or the first of several; None if the configuration has none."""
        return next(iter(self.all(kind)), None)

    def section(self, kind: type[Kind]) -> Kind:
        """Return the section of a class.

        Raises:
            LookupError: the configuration has no such section, or it is null.
        """
        if (found := self.find(kind)) is None:
            raise LookupError(f"{self.name} has no section of type {kind.__name__}")
        return found

    def with_section(self, section: StageSection) -> "Config":
        """Return a copy in which a section replaces the section of the same class."""
        keys = [key for key, one in self.sections.items() if type(one) is type(section)]
        return replace(self, sections=self.sections | dict.fromkeys(keys, section))

    @property
    def cache(self) -> Cache:
        """Cache of files behind URLs."""
        return Cache.of_run(self.run_dir, self.cache_dir, self.cache_gib)

    @property
    def has_contexts(self) -> bool:
        """Return True if the dataset has contexts."""
        return any(one.makes_contexts for one in self._sections())

    @property
    def prepared_key(self) -> str:
        """Return the rule by which ``prepare`` groups records: ``speaker_key`` unless a stage names the speakers."""
        return next(iter(self._prepared_keys()), self.speaker_key)

    @property
    def matched_key(self) -> str:
        """Return the rule for the speaker groups of ``match``: ``speaker_key`` unless a stage names the speakers."""
        return "speaker" if self._prepared_keys() else self.speaker_key

    def _prepared_keys(self) -> list[str]:
        keys = (one.prepared_key(self.speaker_key) for one in self._sections())
        return [key for key in keys if key is not None]

    def _sections(self) -> list[StageSection]:
        found = (one if isinstance(one, list) else [one] for one in self.sections.values())
        return [one for several in found for one in several if one is not None]
