"""Functions that read YAML into dataclasses, with ``key=value`` overrides and errors that name the file and the key.

They read the configurations of datasets, cluster profiles and the training example.
"""

import dataclasses
import math
import re
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Annotated, Any, Final, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

import msgspec
import yaml

from sharmill.config.schema import NAME, NAME_RULE, Config, References, StageSection
from sharmill.errors import ConfigError, one_line, refuse
from sharmill.files.regular import NotRegularError, open_regular
from sharmill.registry import DEFAULT_EXECUTOR, EXECUTORS, SOURCES, STAGE_ALIASES, STAGES, nearest

Loaded = TypeVar("Loaded")
_WORDS_OF_YAML: Final[dict[Any, bool]] = {"yes": True, "on": True, "no": False, "off": False}
_WORDS_OF_TYPES: Final = {
    int: "a whole number", float: "a finite number", str: "text", bool: "true or false", types.NoneType: "null",
    list: "a list", tuple: "a list",
}  # fmt: skip
_LIMITS: Final = {"ge": "of at least", "gt": "above", "le": "of at most", "lt": "below"}
_SHOWN_CHARACTERS: Final = 100
# Limits for untrusted YAML.
_MAX_BYTES: Final = 1 << 20
_MAX_DEPTH: Final = 100
# Top-level keys whose strings may have several lines, and ``sources``, whose classes check their own strings.
_UNCHECKED = ("speaker_key", "setup", "sources")
# C0 and C1 control characters except the tab, and Unicode line separators.
_CONTROL = re.compile("[\x00-\x08\x0a-\x1f\x7f-\x9f\u2028\u2029]")


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Read the configuration of a dataset from a YAML file.

    Args:
        path: the YAML file.
        overrides: ``key=value`` strings that replace values of the file, such as ``match.min_similarity=0.7``.

    Raises:
        ConfigError: the file cannot be read, or a key or value is wrong; the message names file, key and remedy.

    >>> config = load_config("configs/demo.yaml", ["write.shard_size=20"])
    >>> config.sections["write"].shard_size
    20
    """
    return load_typed(Config, path, overrides)


def load_for_display(path: Path) -> Config:
    """Read the stored configuration of a run to display the run.

    Another user may have written the file, so references are not resolved, and no code that it names is imported,
    except for the installed stages of other packages. Sources are replaced by a placeholder, and executors of other
    packages by the default. Options of models and keys of other versions are left out.
    """
    values, references = _read_merged(path, (), for_display=True)
    if _executor_name(values) not in EXECUTORS.own:
        del values["executor"]
    # Stages of packages that are missing or broken here cannot be displayed.
    for key in _added_stages(values):
        if not STAGES.can_load(key):
            del values[key]
    values["sources"] = [{"manifest": "not read", "audio_root": "not read"}] if values.get("sources") else []
    return _to_typed(Config, values, str(path), references, for_display=True)


def load_typed(kind: type[Loaded], path: str | Path, overrides: Sequence[str] = ()) -> Loaded:
    """Read a YAML file into the dataclass ``kind``, with the overrides, checks and errors of ``load_config``."""
    values, references = _read_merged(Path(path), overrides)
    return _to_typed(kind, values, str(path), references)


def to_config(values: dict[str, Any], origin: str) -> Config:
    """Create a configuration from plain values.

    Args:
        values: the values as in a YAML file.
        origin: name of the source of the values, with which error messages begin.

    >>> source = {"manifest": "manifest.json", "audio_root": "audio"}
    >>> config = to_config({"name": "a", "run_dir": "run", "dataset_dir": "data", "sources": [source]}, "example")
    >>> config.sections["match"].encoder
    'resemblyzer'
    """
    return _to_typed(Config, values, origin, References())


def to_yaml(config: Config) -> bytes:
    """Return the whole configuration with defaults as YAML that ``load_config`` can read.

    References to environment variables are not resolved, since the variables may contain secrets.
    """
    from omegaconf import OmegaConf

    return OmegaConf.to_yaml(OmegaConf.create(config.references.put_back(to_plain(config)))).encode()


def to_plain(value: Any) -> Any:
    """Return a configuration as plain values in the layout of its file, with options and sections as ordinary keys."""
    if isinstance(value, list):
        return [to_plain(item) for item in value]
    if isinstance(value, dict):
        return {key: to_plain(item) for key, item in value.items()}
    if not dataclasses.is_dataclass(value):
        return value
    plain: dict[str, Any] = {}
    for field in _key_fields(value):
        found = to_plain(getattr(value, field.name))
        is_beside = field.name == ("sections" if isinstance(value, Config) else _options_of(value))
        plain |= found if is_beside else {field.name: found}
    return plain


def _options_of(owner: Any) -> str:
    """Return the name of the field that holds the options of a section's model; an empty string if there is none.

    In a file, the options are ordinary keys of the section. The attribute ``options_of`` of the section's class holds
    the registry of the models, and the key that names the model.
    """
    return "options" if hasattr(owner, "options_of") else ""


def _read_merged(
    path: Path, overrides: Sequence[str], *, for_display: bool = False
) -> tuple[dict[str, Any], References]:
    """Return the values of a file with the overrides applied, and the references in them.

    Args:
        for_display: treat the file as untrusted, and resolve no references.
    """
    from omegaconf import DictConfig, ListConfig, OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    config: DictConfig | ListConfig
    try:
        with open_regular(path) as stream:
            if for_display:
                config = OmegaConf.create(load_untrusted_yaml(stream, str(path)))
            else:
                _check_nulls(path, yaml.compose(stream, Loader=yaml.SafeLoader))
                stream.seek(0)
                config = OmegaConf.load(stream)
        for override in overrides:
            key, _, text = override.partition("=")
            plain, (section, dot, _) = OmegaConf.to_container(config), key.partition(".")
            # A section that is null has no keys.
            if dot and isinstance(plain, dict) and plain.get(section, "") is None:
                raise ConfigError(
                    f"{path}: {override}: {section} is null: remove either the override or the null",
                    code="bad_config_value",
                )
            _require_entry(plain, key, f"{path}: {override}")
            new, is_list = _parse_override(key, text), OmegaConf.is_list(OmegaConf.select(config, key))
            OmegaConf.update(config, key, new, merge=isinstance(new, dict) and not is_list)
        for key in _replaced_keys(override.partition("=")[::2] for override in overrides):
            OmegaConf.update(config, key, None)
        values = OmegaConf.to_container(config)
        if for_display:
            values, references = References.unresolved(values)
        else:
            references = References.from_values(values)
            values = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    except FileNotFoundError as error:
        raise ConfigError(
            f"configuration file {path} does not exist: correct the path", code="bad_config_file"
        ) from error
    except (OSError, UnicodeDecodeError, NotRegularError) as error:
        raise ConfigError(f"cannot read {path}: {error}", code="bad_config_file") from error
    except yaml.MarkedYAMLError as error:
        mark, problem = error.problem_mark, " ".join((error.problem or "").split())
        where = f"line {mark.line + 1}, column {mark.column + 1}: {problem}; check this line and the line before it"
        raise ConfigError(f"{path} is not valid YAML: {where}", code="bad_config_file") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not valid YAML: {one_line(error)}", code="bad_config_file") from error
    except RecursionError as error:
        raise ConfigError(
            f"{path}: values are nested too deeply or refer to themselves", code="bad_config_file"
        ) from error
    except (OmegaConfBaseException, ValueError, AttributeError, TypeError) as error:
        place, problem = getattr(error, "full_key", None), str(error).partition("\n")[0]
        if unset := re.search(r"Environment variable '(.+)' not found", problem):
            problem = f"the environment variable {unset[1]} is not set"
        raise ConfigError(": ".join(filter(None, [str(path), place, problem])), code="bad_config_value") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: a configuration must be a mapping of keys to values", code="bad_config_file")
    return cast("dict[str, Any]", values), references


def _replaced_keys(overrides: Iterable[tuple[str, str]]) -> Iterator[str]:
    """Yield the keys of a file that must be set to null because an override sets a mutually exclusive key."""
    given: dict[str, Any] = {}
    for key, text in overrides:
        value = _parse_override(key, text)
        given |= {f"{key}.{own}": one for own, one in value.items()} if isinstance(value, dict) else {key: value}
    for key, value in given.items():
        name, _, own = key.partition(".")
        section = STAGES.load_class(name).section if name in STAGES.own else None
        if section is not None and own in section.alternatives and value is not None:
            yield from {f"{name}.{other}" for other in section.alternatives} - given.keys()


def _require_entry(values: Any, key: str, origin: str) -> None:
    """Raise ConfigError if the key of an override names a list entry that does not exist."""
    place = ""
    for part in re.findall(r"[^.\[\]]+", key):
        if isinstance(values, list) and not (part.isdecimal() and int(part) < len(values)):
            raise ConfigError(
                f"{origin}: {place} is a list of length {len(values)}: name an entry by its number, starting with "
                f"{place}.0",
                code="unknown_key",
            )
        values = values[int(part)] if isinstance(values, list) else values.get(part) if isinstance(values, dict) else {}
        place = f"{place}.{part}" if place else part


def load_untrusted_yaml(stream: IO[bytes], origin: str) -> dict[Any, Any]:
    """Return the mapping in an untrusted YAML file, which is called ``origin`` in messages.

    Raises:
        ConfigError: the file is larger than 1 MiB, nested deeper than 100 levels, or not a mapping; or it has aliases,
            which let a few lines expand to more than fits into memory.
        yaml.YAMLError: the file is not YAML, or has Python tags.
    """
    data = stream.read(_MAX_BYTES + 1)
    refuse(
        (len(data) > _MAX_BYTES, f"{origin} is larger than 1 MiB: it is not a configuration"), code="bad_config_file"
    )
    depth = 0
    # The parser yields events without recursion, so deep nesting cannot exhaust the stack.
    for event in yaml.parse(data, Loader=yaml.SafeLoader):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        line = f"{origin}: line {event.start_mark.line + 1}"
        refuse(
            (isinstance(event, yaml.AliasEvent), f"{line} has an alias: it is not a configuration that sharmill wrote"),
            (depth > _MAX_DEPTH, f"{line} has more than {_MAX_DEPTH} levels: it is not a configuration"),
            code="bad_config_file",
        )
    values = yaml.safe_load(data)
    refuse((not isinstance(values, dict), f"{origin} is not a mapping of keys to values"), code="bad_config_file")
    return cast("dict[Any, Any]", values)


def _check_nulls(path: Path, root: yaml.Node | None) -> None:
    """Raise ConfigError if an audio_root or a stage is empty or ~; where null has a meaning, it must be spelled out."""
    top = _pairs(root)
    of_sources = (
        pair for key, value in top if key.value == "sources" for entry in value.value for pair in _pairs(entry)
    )
    for key, value in (*top, *of_sources):
        if value.tag.endswith(":null") and value.value != "null" and (remedy := _remedy_of_null(key.value)):
            raise ConfigError(
                f"{path}: line {key.start_mark.line + 1}: {key.value} is {value.value or 'empty'}; {remedy}",
                code="bad_config_value",
            )


def _remedy_of_null(key: str) -> str:
    """Return advice for an empty key whose null is meaningful; an empty string for other keys."""
    if key == "audio_root":
        return "name a folder, or write null to accept absolute paths anywhere"
    section = STAGES.load_class(key).section if key in STAGES.own else None
    if section is None or section.presence != "unless_null":
        return ""
    return f"give it keys, or write null for {section.without}"


def _pairs(node: object) -> list[tuple[yaml.Node, yaml.Node]]:
    return node.value if isinstance(node, yaml.MappingNode) else []


def _to_typed(
    kind: type[Loaded], values: dict[str, Any], origin: str, references: References, *, for_display: bool = False
) -> Loaded:
    _check_controls(values, origin, "")
    loaded = _make_section(kind, values, "", origin, for_display=for_display)
    if isinstance(loaded, Config):
        loaded = dataclasses.replace(loaded, references=references)
    return cast("Loaded", loaded)


def _make(kind: Any, value: Any, place: str, origin: str, *, for_display: bool = False) -> Any:
    """Return a plain value converted to the type ``kind``.

    Args:
        place: path of the value, such as ``sources[0]``.
        for_display: leave out unknown keys and options of models.
    """
    owner = _without_null(kind, value)
    form, kinds = get_origin(owner), get_args(owner)
    # The type of sources is a tuple of classes, one per entry.
    if isinstance(value, list) and (form is list or (form is tuple and all(map(dataclasses.is_dataclass, kinds)))):
        kinds = kinds * len(value) if form is list else kinds
        pairs = enumerate(zip(kinds, value, strict=True))
        return [
            _make(one, _with_model_key(one, item), f"{place}[{n}]", origin, for_display=for_display)
            for n, (one, item) in pairs
        ]
    if isinstance(value, dict) and dataclasses.is_dataclass(owner):
        return _make_section(owner, value, place, origin, for_display=for_display)
    try:
        if kind is bool and isinstance(value, str):
            value = _WORDS_OF_YAML.get(value, value)
        # The conversion is not strict, since a number may be quoted, overrides are strings, and YAML reads 1e3 as a
        # string.
        made = msgspec.convert(value, kind, strict=False)
        if isinstance(made, float) and not math.isfinite(made):
            raise msgspec.ValidationError(f"{made} is not finite")
        return made
    except msgspec.ValidationError as error:
        raise ConfigError(f"{origin}: {_readable(kind, value, str(error), place)}", code="bad_config_value") from error


def _with_model_key(kind: Any, item: Any) -> Any:
    """Return a list item as a mapping if it is only the name of a model and the other keys have defaults."""
    is_name = isinstance(item, str) and _options_of(kind) and _required_keys(kind) == [kind.options_of[1]]
    return {kind.options_of[1]: item} if is_name else item


def _required_keys(kind: Any) -> list[str]:
    missing = dataclasses.MISSING
    return [field.name for field in _key_fields(kind) if field.default is field.default_factory is missing]


def _make_section(kind: Any, values: dict[Any, Any], place: str, origin: str, *, for_display: bool = False) -> Any:
    """Return the dataclass described by a mapping, which may also contain options of a model or sections of stages."""
    types = _own_types(kind) if for_display and kind is not Config else _types_of(kind, values, _at(origin, place))
    if not for_display and (unknown := [key for key in values if key not in types]):
        raise _unknown_key(types, unknown[0], place, origin)
    made = {
        key: _make(types[key], values[key], f"{place}.{key}" if place else key, origin, for_display=for_display)
        for key in types if key in values
    }  # fmt: skip
    fields = {field.name: field for field in _key_fields(kind)}
    if kind is Config:
        made["sections"] = _make_sections(types, made, origin)
    elif options := made.keys() - fields:
        # Options keep their values from the file; only strings are converted, because they may come from overrides.
        made[_options_of(kind)] = {key: made[key] if isinstance(values[key], str) else values[key] for key in options}
    made = {key: value for key, value in made.items() if key in fields}
    refuse(
        *((name not in made, f"{_at(origin, place)}: the key '{name}' is missing") for name in _required_keys(kind)),
        code="missing_key",
    )
    try:
        return kind(**made)
    except (ValueError, TypeError, OverflowError) as error:
        raise ConfigError(f"{_at(origin, place)}: {error}", code="bad_config_value") from error


def _make_sections(types: dict[str, Any], made: dict[str, Any], origin: str) -> dict[str, Any]:
    """Return the sections of stages in the order of the stages; missing sections that are required get defaults."""
    sections: dict[str, Any] = {}
    for key in (key for key in types if key not in get_type_hints(Config)):
        if key in made:
            sections[key] = made[key]
        elif _without_null(types[key]).presence != "if_given":
            sections[key] = _make(types[key], {}, key, origin)
        else:
            continue
        several = isinstance(sections[key], list)
        names: list[str] = []
        for one in sections[key] if several else [sections[key]]:
            name = str(getattr(one, "name", ""))
            where = f"{key}[{len(names)}]" if several else key
            if (several or name) and (not NAME.fullmatch(name) or name in names):
                raise ConfigError(
                    f"{origin}: {where}: name {name!r} {NAME_RULE}, and be unique",
                    code="bad_config_value",
                )
            names.append(name)
    return sections


def _at(origin: str, place: str) -> str:
    return f"{origin}: {place}" if place else origin


def _check_controls(value: Any, origin: str, key: str) -> None:
    """Raise ConfigError if a key or string contains control characters, except the strings of a few top-level keys."""
    if isinstance(value, dict):
        for name, child in value.items():
            check_one_line(str(name), f"{origin}: the key {name!r}")
            if key or name not in _UNCHECKED:
                _check_controls(child, origin, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list):
        for number, child in enumerate(value):
            _check_controls(child, origin, f"{key}[{number}]")
    elif isinstance(value, str):
        check_one_line(value, f"{origin}: {key}")


def check_one_line(text: str, what: str) -> None:
    """Raise ConfigError if a string that becomes part of a line of a script or manifest contains control characters."""
    if found := _CONTROL.search(text):
        raise ConfigError(
            f"{what} contains the control character {found[0]!r}: use one line of plain text", code="bad_config_value"
        )


def _own_types(kind: Any) -> dict[str, Any]:
    """Return the types of the keys of a dataclass, without the field for options or sections."""
    hints = get_type_hints(kind, include_extras=True)
    beside = "sections" if kind is Config else _options_of(kind)
    return {field.name: hints[field.name] for field in _key_fields(kind) if field.name != beside}


def _key_fields(kind: Any) -> list[dataclasses.Field[Any]]:
    """Return the fields of a dataclass that are configuration keys."""
    return [field for field in dataclasses.fields(kind) if field.metadata.get("is_key", True)]


def _types_of(kind: type, values: Any, origin: str = "") -> dict[str, Any]:
    """Return the types of the keys of a dataclass; for a configuration they depend on its sources and executor.

    The type of ``sources`` is a tuple of classes, one per entry. The sections of stages follow the general keys.
    """
    found = _own_types(kind)
    if kind is not Config:
        return _with_options(kind, found, values, origin)
    found["executor"] = _load(EXECUTORS.load_class, _executor_name(values), f"{origin}: executor.kind")
    entries = values.get("sources") if isinstance(values, dict) else None
    if isinstance(entries, list) and entries:
        names = [entry.get("type") if isinstance(entry, dict) else None for entry in entries]
        found["sources"] = types.GenericAlias(tuple, tuple(
            _load(SOURCES.load_class, "nemo" if name is None else str(name), f"{origin}: sources[{number}].type")
            for number, name in enumerate(names)
        ))  # fmt: skip
    for name in (*STAGES.own, *_added_stages(values)):
        if (section := STAGES.load_class(name).section) is not None:
            if not (
                isinstance(section, type) and issubclass(section, StageSection) and dataclasses.is_dataclass(section)
            ):
                raise ConfigError(
                    f"{origin}: the section of the stage {name!r} must be a dataclass derived from StageSection",
                    code="bad_plugin",
                )
            by_presence: dict[str, Any] = {"always": section, "unless_null": section | None}
            found[name] = by_presence.get(section.presence, section | list[section] | None)  # type: ignore[valid-type]
    return found


def _load(load: Callable[[str], Any], name: str, what: str) -> Any:
    """Load a class from a registry; ``what`` is prepended to error messages."""
    try:
        return load(name)
    except ConfigError as error:
        raise ConfigError(f"{what}: {error}", code=error.code) from error


def _added_stages(values: Any) -> list[str]:
    """Return the keys of a configuration that name stages of other installed packages."""
    known = {*get_type_hints(Config), *STAGES.own}
    others = [key for key in values if key not in known] if isinstance(values, dict) else []
    # STAGES.names() scans all installed packages, so it is called only if necessary.
    names = STAGES.names() if others else ()
    return [key for key in others if key in names]


def _executor_name(values: Any) -> str:
    section = values.get("executor") if isinstance(values, dict) else None
    name = section.get("kind") if isinstance(section, dict) else None
    return name if isinstance(name, str) else DEFAULT_EXECUTOR


def _with_options(kind: Any, types: dict[str, Any], values: Any, origin: str) -> dict[str, Any]:
    """Return the types of the keys of a section, including the options of its model.

    Raises:
        ConfigError: the model does not exist, or one of its options has the name of a key of the section.
    """
    if not _options_of(kind) or values.keys() <= types.keys():
        return types
    registry, key = kind.options_of
    if not (name := values.get(key, getattr(kind, key, None))):
        return types
    family = _load(registry.load, registry.split(str(name))[0], origin)
    options: dict[str, Any] = family.options() if hasattr(family, "options") else {}
    if taken := sorted(options.keys() & types):
        raise ConfigError(
            f"{origin}: the model's option {taken[0]!r} has the name of another key: rename it", code="bad_plugin"
        )
    return types | options


def _parse_override(key: str, text: str) -> Any:
    """Return the value of an override: null, a YAML value, or a string that is converted to the type of the key later.

    Lists, mappings and quoted strings are parsed as YAML. All other values stay strings, as in ``name=0123``; so do
    ``[^/]+`` in ``speaker_key=[^/]+``, which is not valid YAML, and ``{speaker}``.
    """
    if text in ("", "~", "null"):
        # A meaningful null must be spelled out, so an empty value or ~ is kept and causes an error.
        return text if text != "null" and _remedy_of_null(key.rpartition(".")[2]) else None
    is_mapping = text[0] == "{" and (text == "{}" or ": " in text)
    try:
        return yaml.safe_load(text) if is_mapping or text[0] in "['\"" else text
    except yaml.YAMLError:
        return text


def _without_null(kind: Any, value: Any = None) -> Any:
    """From a union, return the dataclass or list type that fits a value; return any other type unchanged."""
    if get_origin(kind) not in (Union, types.UnionType):
        return kind
    parts = get_args(kind)
    lists = [part for part in parts if get_origin(part) is list and isinstance(value, list)]
    return next(iter(lists or [part for part in parts if dataclasses.is_dataclass(part)]), kind)


def _unknown_key(types: dict[str, Any], key: Any, place: str, origin: str) -> ConfigError:
    """Return the error about an unknown key, with a suggestion, which may be a key of a section."""
    name = f"{place}.{key}" if place else f"{key}"
    meant = nearest(str(key), list(types))
    if place == "executor":
        kinds = [kind for kind in EXECUTORS.own if key in _own_types(EXECUTORS.load_class(kind))]
        meant = f"; it is a key of executor.kind {' or '.join(kinds)}" if kinds else meant
    elif not place:
        below = []
        for section, owner in types.items():
            if get_origin(owner) in (list, tuple):
                section, owner = f"{section}[0]", get_args(owner)[0]
            owner = _without_null(owner)
            if dataclasses.is_dataclass(owner) and key in {field.name for field in dataclasses.fields(owner)}:
                below.append(f"'{section}.{key}'")
        meant = f"; did you mean {' or '.join(below)}?" if below else meant
    return ConfigError(f"{origin}: unknown key '{name}'{meant}", code="unknown_key")


def _readable(kind: Any, value: Any, message: str, place: str) -> str:
    """Return a message with the path, the wrong value, and the allowed values or msgspec's explanation."""
    text, _, where = message.partition(" - at `$")
    text = f"allowed: {', '.join(_allowed(kind))}"
    if where:
        text = message.partition(" - at ")[0].replace("`object", "`mapping").replace("`array", "`list")
        text = text[0].lower() + text[1:]
    shown = "null" if value is None else repr(value)
    return f"{place}{where.strip('`').replace('[...]', '')} is {shown[:_SHOWN_CHARACTERS]}; {text}"


def _allowed(kind: Any) -> list[str]:
    """Return descriptions of the values that a type allows, in YAML terms."""
    form, parts = get_origin(kind), get_args(kind)
    if form is Literal:
        return [str(value) for value in parts]
    if form in (Union, types.UnionType):
        return [words for part in parts for words in _allowed(part)]
    if form is Annotated:
        limits = [
            f"{words} {limit:g}"
            for name, words in _LIMITS.items()
            if (limit := getattr(parts[1], name, None)) is not None
        ]
        return [" ".join(filter(None, [*_allowed(parts[0]), " and ".join(limits)]))]
    return [_WORDS_OF_TYPES.get(form or kind, "a mapping of keys to values")]


def resolve_stage(name: str) -> str:
    """Return the kind of a stage that is given by name or alias.

    Raises:
        ConfigError: the stage does not exist.

    >>> resolve_stage("stage1")
    'match'
    """
    stage, names = STAGE_ALIASES.get(name, name), STAGES.names()
    if stage not in names:
        raise ConfigError(f"unknown stage {name!r}{nearest(name, [*names, *STAGE_ALIASES])}", code="unknown_stage")
    return stage
