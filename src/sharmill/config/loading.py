"""Reading of YAML into dataclasses, with ``key=value`` overrides and errors that name the file and the key.

Configurations of datasets, cluster profiles and the training example are read with these functions.
"""

from __future__ import annotations

import dataclasses
import re
import types
import typing
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, TypeVar

import msgspec

from sharmill.config.references import References
from sharmill.config.schema import NAME, Config, StageSection
from sharmill.config.untrusted import load_untrusted_yaml
from sharmill.errors import ConfigError
from sharmill.files.storage import NotRegularError, open_regular
from sharmill.registry import DEFAULT_EXECUTOR, EXECUTORS, SOURCES, STAGE_ALIASES, STAGES, nearest

if TYPE_CHECKING:
    from yaml import Node

# Keys of earlier versions, and what to use instead.
_REMOVED_KEYS: Final = {
    "encode.compile": "codecs run as they are; leave the key out",
    "executor.mixed_versions": "restore the versions that the stage was begun with, or begin it anew with --restart",
    "executor.mixed_devices": "a stage keeps to the kind of device that it was begun on; leave the key out",
    "submit_ahead": "leave the key out; the jobs of a stage are submitted when it is planned",
    "metrics.tensorboard": "set metrics.wandb_project, or look at sharmill status RUN_DIR --json or --prometheus FILE",
}

# The field of a section for the options of a model, which lie beside its keys; ``options_of`` of the section's class is
# the registry of such models, and the key that names one.
_OPTIONS: Final = "options"

Loaded = TypeVar("Loaded")
_OF_SEVERAL_LINES = ("speaker_key", "setup")
# C0 and C1 but the tab, and what ends lines in Unicode.
_CONTROL = re.compile("[\x00-\x08\x0a-\x1f\x7f-\x9f\u2028\u2029]")


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Read the configuration of a dataset from a YAML file.

    Args:
        path: the file.
        overrides: ``key=value`` texts that replace values of the file, such as ``match.min_similarity=0.7``.

    Raises:
        ConfigError: the file cannot be read, or a key or value is wrong; the message names file, key and remedy.

    >>> config = load_config("configs/demo.yaml", ["write.shard_size=20"])
    >>> config.sections["write"].shard_size
    20
    """
    return load_typed(Config, path, overrides)


def load_for_display(path: Path) -> Config:
    """Read the configuration that a run has stored, to show the run: a stand-in takes the place of its sources.

    The type of a source may name code of another package, which is not imported to show progress; so may a model, whose
    options are left out, and an executor. Of other packages only stages that are installed here are imported. Keys of
    other versions are left out.
    """
    values, _ = _read_merged(Config, path, (), for_display=True)
    stand_in = {"manifest": "not read", "audio_root": "not read"}
    if _executor_name(values) not in EXECUTORS.own:
        del values["executor"]
    # Stages of packages that are not installed here, or broken, cannot be shown.
    for key in _added_stages(values):
        if not STAGES.can_load(key):
            del values[key]
    types = _types_of(Config, values | {"sources": [stand_in]})
    values = {key: _gather_options(types[key], values[key], keep=False) for key in values if key in types}
    return to_config(values | {"sources": [stand_in]}, str(path))


def load_typed(kind: type[Loaded], path: str | Path, overrides: Sequence[str] = ()) -> Loaded:
    """Read a YAML file as the dataclass ``kind``, with the overrides, checks and errors of ``load_config``."""
    values, references = _read_merged(kind, Path(path), overrides)
    loaded = _to_typed(kind, values, str(path))
    if isinstance(loaded, Config):
        # Not a key: nothing that is compared or written as a part of the configuration.
        object.__setattr__(loaded, "references", references)
    return loaded


def to_config(values: dict[str, Any], origin: str) -> Config:
    """Make a configuration from plain values.

    Args:
        values: what a YAML file would contain.
        origin: where the values came from; error messages begin with it.

    >>> source = {"manifest": "manifest.json", "audio_root": "audio"}
    >>> config = to_config({"name": "a", "run_dir": "run", "dataset_dir": "data", "sources": [source]}, "example")
    >>> config.sections["match"].encoder
    'resemblyzer'
    """
    return _to_typed(Config, values, origin)


def to_yaml(config: Config) -> bytes:
    """Return the whole configuration, defaults included, as YAML that ``load_config`` reads.

    References are written as they were, since the environment may hold secrets.
    """
    from omegaconf import OmegaConf

    return OmegaConf.to_yaml(OmegaConf.create(config.references.put_back(to_plain(config)))).encode()


def to_plain(value: Any) -> Any:
    """Return a configuration as plain values, with options and sections beside other keys as in its file."""
    if isinstance(value, list):
        return [to_plain(item) for item in value]
    if isinstance(value, dict):
        return {key: to_plain(item) for key, item in value.items()}
    if not dataclasses.is_dataclass(value):
        return value
    plain: dict[str, Any] = {}
    for field in dataclasses.fields(value):
        found = to_plain(getattr(value, field.name))
        is_beside = field.name == ("sections" if isinstance(value, Config) else _options_of(value))
        plain |= found if is_beside else {field.name: found}
    return plain


def _options_of(owner: Any) -> str:
    """Return the field of a section that has the options of its model, or nothing where it names none."""
    return _OPTIONS if hasattr(owner, "options_of") else ""


def _read_merged(
    kind: type, path: Path, overrides: Sequence[str], *, for_display: bool = False
) -> tuple[dict[str, Any], References]:
    """Return the values of a file with the overrides, and the references among them.

    For a display, the file may be one that others wrote, and variables that are not set here stand for themselves.
    """
    import yaml
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
            key, _, value = override.partition("=")
            plain = OmegaConf.to_container(config)
            types = _types_of(kind, plain, key)
            _check_section(types, config, key, f"{path}: {override}")
            is_list = OmegaConf.is_list(OmegaConf.select(config, key))
            OmegaConf.update(config, key, _override_value(value, _type_at(types, key, plain)), merge=not is_list)
        references = References.of(OmegaConf.to_container(config))
        if for_display:
            config = OmegaConf.create(references.without_unset(OmegaConf.to_container(config)))
        values = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    except FileNotFoundError as error:
        raise ConfigError(f"there is no configuration file {path}", code="bad_config_file") from error
    except (OSError, UnicodeDecodeError, NotRegularError) as error:
        raise ConfigError(f"cannot read {path}: {error}", code="bad_config_file") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not valid YAML: {_describe_yaml_error(error)}", code="bad_config_file") from error
    except RecursionError as error:
        raise ConfigError(
            f"{path}: values are nested too deeply, or contain themselves", code="bad_config_file"
        ) from error
    except (OmegaConfBaseException, ValueError, AttributeError, TypeError) as error:
        raise ConfigError(f"{path}: {' '.join(str(error).split())}", code="bad_config_value") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: a configuration is a mapping of keys to values", code="bad_config_file")
    return typing.cast("dict[str, Any]", values), references


def _check_nulls(path: Path, root: Node | None) -> None:
    """Raise ConfigError where an audio_root, or a stage, is empty or ~: its null has a meaning, and has to be said."""
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
    """Return what to write instead of an empty key whose null has a meaning; nothing of any other key."""
    if key == "audio_root":
        return "name a folder, or write null to take absolute paths anywhere"
    section = STAGES.load_class(key).section if key in STAGES.own else None
    if section is None or section.presence != "unless_null":
        return ""
    return f"give it keys, or write null for {section.without}"


def _pairs(node: object) -> list[tuple[Node, Node]]:
    import yaml

    return node.value if isinstance(node, yaml.MappingNode) else []


def _check_section(types: dict[str, Any], config: Any, key: str, origin: str) -> None:
    """Raise ConfigError where a key of a section is overridden that is null, which leaves out all that it is about."""
    section, dot, _ = key.partition(".")
    may_be_null = type(None) in typing.get_args(types.get(section))
    if dot and may_be_null and section in config and config[section] is None:
        raise ConfigError(f"{origin}: {section} is null; leave this out, or null", code="bad_config_value")


def _to_typed(kind: type[Loaded], values: dict[str, Any], origin: str) -> Loaded:
    types = _types_of(kind, values, origin)
    _check_keys(types, values, origin, "")
    _check_controls({key: value for key, value in values.items() if key != "sources"}, origin, "")
    if kind is Config:
        values = _make_parts(values, types, origin)
    try:
        return _convert(values, kind)
    except msgspec.ValidationError as error:
        raise _refusal(types, error, origin) from error


def _convert(values: Any, kind: Any) -> Any:
    # Not strict: a number may be quoted, and YAML takes 1e3 for text.
    return msgspec.convert(values, kind, strict=False)


def _make_parts(values: dict[str, Any], types: dict[str, Any], origin: str) -> dict[str, Any]:
    """Return the values of a configuration with its sources and sections made, by the classes that are theirs."""
    made = dict(values)
    if typing.get_origin(types["sources"]) is tuple:
        pairs = zip(values["sources"], typing.get_args(types["sources"]), strict=True)
        made["sources"] = [_make(one, kind, f"sources[{number}]", origin) for number, (one, kind) in enumerate(pairs)]
    if "executor" in values:
        made["executor"] = _make(values["executor"], types["executor"], "executor", origin)
    made["sections"] = {}
    for key in (key for key in types if key not in typing.get_type_hints(Config)):
        value, kind = made.pop(key, None if _section_of(types[key]).presence == "if_given" else {}), types[key]
        if isinstance(value, list) and _section_of(kind).presence == "if_given":
            made["sections"][key] = _make_list(value, _section_of(kind), key, origin)
        elif value is not None or key in values:
            made["sections"][key] = _make(value, kind, key, origin)
            if name := getattr(made["sections"][key], "name", ""):
                _check_name(name, key, origin)
    return made


def _make(value: Any, kind: Any, key: str, origin: str) -> Any:
    """Return the part of a configuration that a value describes."""
    try:
        return _convert(_gather_options(kind, value), kind)
    except msgspec.ValidationError as error:
        raise _refusal({key: kind}, error, origin, key) from error


def _make_list(values: list[Any], kind: type[StageSection], key: str, origin: str) -> list[Any]:
    """Return the sections of a list, whose names tell their stages apart."""
    made = [_make(value, kind, f"{key}[{number}]", origin) for number, value in enumerate(values)]
    names = [str(getattr(one, "name", "")) for one in made]
    for number, name in enumerate(names):
        _check_name(name, f"{key}[{number}]", origin, names[:number])
    return made


def _check_name(name: str, key: str, origin: str, others: Sequence[str] = ()) -> None:
    if not NAME.fullmatch(name) or name in others:
        raise ConfigError(
            f"{origin}: {key}: name {name!r} must be letters, digits, '_', '-', '.', and no other's",
            code="bad_config_value",
        )


def _check_controls(value: Any, origin: str, key: str) -> None:
    """Raise ConfigError where a key or a text has control characters, but for the keys at the top whose texts may."""
    if isinstance(value, dict):
        for name, child in value.items():
            check_one_line(str(name), f"{origin}: the key {name!r}")
            if key or name not in _OF_SEVERAL_LINES:
                _check_controls(child, origin, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list):
        for number, child in enumerate(value):
            _check_controls(child, origin, f"{key}[{number}]")
    elif isinstance(value, str):
        check_one_line(value, f"{origin}: {key}")


def check_one_line(text: str, what: str) -> None:
    """Raise ConfigError where text has control characters: it would become lines of scripts, logs and manifests."""
    if found := _CONTROL.search(text):
        raise ConfigError(
            f"{what} has the control character {found[0]!r}: it must be one line of text", code="bad_config_value"
        )


def _refusal(types: dict[str, Any], error: msgspec.ValidationError, origin: str, prefix: str = "") -> ConfigError:
    code = "missing_key" if "missing required field" in str(error) else "bad_config_value"
    return ConfigError(f"{origin}: {_readable(types, str(error), prefix)}", code=code)


def _source_kinds(values: Any, origin: str) -> list[Any]:
    """Return the classes of the entries of ``sources``."""
    entries = values.get("sources") if isinstance(values, dict) else None
    entries = entries if isinstance(entries, list) else []
    names = [entry.get("type") if isinstance(entry, dict) else None for entry in entries]
    return [_source_type(name, number, origin) for number, name in enumerate(names)]


def _types_of(kind: type, values: Any, origin: str = "") -> dict[str, Any]:
    """Return the types of the keys of a dataclass; those of a configuration depend on what its values name.

    The type of ``sources`` is a tuple of the classes of its entries; sections follow the keys that belong to no stage.
    """
    hints = typing.get_type_hints(kind)
    found: dict[str, Any] = {field.name: hints[field.name] for field in dataclasses.fields(kind)}
    if kind is not Config:
        return _with_options(kind, found, values, origin)
    del found["sections"]
    found["executor"] = _executor_type(values, origin)
    if kinds := _source_kinds(values, origin):
        found["sources"] = types.GenericAlias(tuple, tuple(kinds))
    for kind_of_stage in (*STAGES.own, *_added_stages(values)):
        if (section := STAGES.load_class(kind_of_stage).section) is not None:
            if not (
                isinstance(section, type) and issubclass(section, StageSection) and dataclasses.is_dataclass(section)
            ):
                message = f"the section of the stage {kind_of_stage!r} is no dataclass derived from StageSection"
                raise ConfigError(f"{origin}: {message}", code="bad_plugin")
            found[kind_of_stage] = _with_presence(section)
    return found


def _added_stages(values: Any) -> list[str]:
    """Return the keys of a configuration that name stages of other packages, as far as these are installed."""
    known = {*typing.get_type_hints(Config), *STAGES.own}
    others = [key for key in values if key not in known] if isinstance(values, dict) else []
    # It takes a look at every installed package.
    names = STAGES.names() if others else ()
    return [key for key in others if key in names]


def _executor_name(values: Any) -> str:
    section = values.get("executor") if isinstance(values, dict) else None
    name = section.get("kind") if isinstance(section, dict) else None
    return name if isinstance(name, str) else DEFAULT_EXECUTOR


def _has_key(executor: str, key: Any) -> bool:
    return key in {field.name for field in dataclasses.fields(EXECUTORS.load_class(executor))}


def _executor_type(values: Any, origin: str) -> Any:
    """Return the class of the executor that values name, or of the default one."""
    try:
        return EXECUTORS.load_class(_executor_name(values))
    except ConfigError as error:
        raise ConfigError(f"{origin}: executor.kind: {error}", code=error.code) from error


def _with_options(kind: Any, types: dict[str, Any], values: Any, origin: str) -> dict[str, Any]:
    """Return the types of the keys of a section with those of the options of the model that its values name.

    Raises:
        ConfigError: there is no such model, or it has an option that is a key of the section.
    """
    types.pop(_options_of(kind), None)
    if not _options_of(kind) or values.keys() <= types.keys():
        return types
    registry, key = kind.options_of
    if not (name := values.get(key, getattr(kind, key, None))):
        return types
    try:
        family = registry.load(registry.split(str(name))[0])
    except ConfigError as error:
        raise ConfigError(f"{origin}: {error}", code=error.code) from error
    options: dict[str, Any] = family.options() if hasattr(family, "options") else {}
    if taken := sorted(options.keys() & types):
        raise ConfigError(f"{origin}: the model's option {taken[0]!r} is another key already", code="bad_plugin")
    return types | options


def _gather_options(kind: Any, values: Any, *, keep: bool = True) -> Any:
    """Return values in which the options beside the keys of a section are one value of it.

    Without ``keep``, options and unknown keys are left out.
    """
    kind = _without_null(kind, values)
    if typing.get_origin(kind) is list and isinstance(values, list):
        return [_gather_options(typing.get_args(kind)[0], value, keep=keep) for value in values]
    if not dataclasses.is_dataclass(kind) or not isinstance(values, dict):
        return values
    types, beside = typing.get_type_hints(kind), _options_of(kind)
    types.pop(beside, None)
    own = {key: _gather_options(types[key], value, keep=keep) for key, value in values.items() if key in types}
    others = {key: value for key, value in values.items() if key not in types}
    return own if not keep else own | ({beside: others} if beside else others)


def _with_presence(section: type[StageSection]) -> Any:
    if section.presence == "always":
        return section
    return section | None if section.presence == "unless_null" else section | list[section] | None  # type: ignore[valid-type]


def _section_of(kind: Any) -> type[StageSection]:
    return typing.cast("type[StageSection]", _without_null(kind))


def _source_type(name: Any, number: int, origin: str) -> Any:
    """Return the class of a type of sources; ``nemo`` if none is named."""
    try:
        return SOURCES.load_class("nemo" if name is None else str(name))
    except ConfigError as error:
        raise ConfigError(f"{origin}: sources[{number}].type: {error}", code=error.code) from error


def _describe_yaml_error(error: Exception) -> str:
    """Return the problem of an error of PyYAML, and its place, as one line."""
    mark = getattr(error, "problem_mark", None)
    if mark is None:
        return " ".join(str(error).split())
    problem = " ".join(str(getattr(error, "problem", "")).split())
    return f"line {mark.line + 1}, column {mark.column + 1}: {problem}; look at this line and the one before it"


def _override_value(text: str, expected: Any) -> Any:
    """Return the value that the right side of an override stands for: YAML, or the text itself where text is expected.

    ``name=0123`` is a name, and what is no YAML is text as well: ``prepare.filters.cer=>= 3``, ``speaker_key=[^/]+``.
    """
    import yaml

    is_union = typing.get_origin(expected) in (typing.Union, types.UnionType)
    parts = set(typing.get_args(expected)) if is_union else {expected}
    is_text = str in parts and not parts & {int, float, bool}
    may_be_list = any(typing.get_origin(part) is list for part in parts)
    is_null = expected is not str and text.lower() in ("", "null", "~")
    if is_text and text and not is_null and text[0] not in ("'\"[" if may_be_list else "'\""):
        # Text as it stands, be it like a number or with a '#' in it.
        return text
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        return text
    may_be_section = is_union and any(dataclasses.is_dataclass(part) for part in parts)
    if value is None and text != "null" and (may_be_section or (is_text and may_be_list)):
        return text  # nothing, or ~: null opens all folders, or leaves out contexts, and has to be said
    as_it_is = (str, list) if may_be_list else str
    return text if is_text and value is not None and not isinstance(value, as_it_is) else value


def _type_at(types: dict[str, Any], key: str, values: Any = None) -> Any:
    """Return the type of a key such as ``sources[0].manifest`` or ``sources.0.manifest``, or None.

    That of an option depends on the model that ``values`` name.
    """
    parts = re.findall(r"[^.\[\]]+", key)
    owner = types.get(parts[0]) if parts else None
    for before, part in pairwise(parts):
        values = _item(values, before)
        owner = _without_null(owner, values)
        origin, items = typing.get_origin(owner), typing.get_args(owner)
        if origin in (list, tuple) and part.isdigit():
            owner = items[0] if origin is list else items[int(part)] if int(part) < len(items) else None
        elif dataclasses.is_dataclass(owner):
            given = {**values, part: None} if isinstance(values, dict) else {}
            owner = _with_options(owner, typing.get_type_hints(owner), given, key).get(part)
        else:
            owner = items[1] if origin is dict else None
    return owner


def _item(values: Any, key: str) -> Any:
    if isinstance(values, dict):
        return values.get(key)
    return values[int(key)] if isinstance(values, list) and key.isdigit() and int(key) < len(values) else None


def _without_null(kind: Any, value: Any = None) -> Any:
    """Return the part of a union that a value may be a mapping or a list of; any other type as it is."""
    if typing.get_origin(kind) not in (typing.Union, types.UnionType):
        return kind
    parts = typing.get_args(kind)
    lists = [part for part in parts if typing.get_origin(part) is list and isinstance(value, list)]
    return next(iter(lists or [part for part in parts if dataclasses.is_dataclass(part)]), kind)


def _check_keys(types: dict[str, Any], values: dict[Any, Any], origin: str, prefix: str) -> None:
    """Raise ConfigError for the first key of a mapping, or of one within it, that has no type."""
    for key, value in values.items():
        if key not in types:
            if removed := _REMOVED_KEYS.get(f"{prefix}{key}"):
                raise ConfigError(f"{origin}: the key '{prefix}{key}' was removed: {removed}", code="unknown_key")
            meant = nearest(str(key), list(types)) if prefix else _nearest_below(str(key), types)
            if prefix == "executor." and (kinds := [name for name in EXECUTORS.own if _has_key(name, key)]):
                meant = f"; it is a key of the kind {' or '.join(kinds)}"
            raise ConfigError(f"{origin}: unknown key '{prefix}{key}'{meant}", code="unknown_key")
        _check_keys_within(types[key], value, origin, f"{prefix}{key}")


def _check_keys_within(owner: Any, value: Any, origin: str, place: str) -> None:
    owner = _without_null(owner, value)
    items = typing.get_args(owner)
    if isinstance(value, list) and typing.get_origin(owner) in (list, tuple):
        kinds = items if typing.get_origin(owner) is tuple else items * len(value)
        for number, (item, kind) in enumerate(zip(value, kinds, strict=False)):
            _check_keys_within(kind, item, origin, f"{place}[{number}]")
    elif isinstance(value, dict) and dataclasses.is_dataclass(owner):
        types = _types_of(typing.cast("type", owner), value, f"{origin}: {place}")
        _check_keys(types, value, origin, f"{place}.")
        for key in value.keys() - {field.name for field in dataclasses.fields(owner)}:
            _make(value[key], types[key], f"{place}.{key}", origin)


def _nearest_below(name: str, types: dict[str, Any]) -> str:
    """Return the end of a sentence about a key that the top of a configuration lacks; a section may have it."""
    below = []
    for section, owner in types.items():
        if typing.get_origin(owner) in (list, tuple):
            section, owner = f"{section}[0]", typing.get_args(owner)[0]
        owner = _without_null(owner)
        if dataclasses.is_dataclass(owner) and name in {field.name for field in dataclasses.fields(owner)}:
            below.append(f"'{section}.{name}'")
    return f"; did you mean {' or '.join(below)}?" if below else nearest(name, list(types))


def _readable(types: dict[str, Any], message: str, prefix: str = "") -> str:
    """Rewrite a message of msgspec, ``... - at `$.min_similarity```, with the key first, in words of YAML.

    Args:
        types: by key; the message is about the one that ``prefix`` is, if it is given.
    """
    text, _, where = message.partition(" - at `$")
    where = where.strip("`.").replace("[...]", "")
    choices = _choices(_type_at({"top": types[prefix]}, f"top.{where}") if prefix else _type_at(types, where))
    where = ".".join(part for part in (prefix, where) if part).replace(".[", "[")
    if missing := re.fullmatch(r"Object missing required field `(.*)`", text):
        text = f"the key '{missing[1]}' is missing"
    elif invalid := re.fullmatch(r"Invalid enum value (.*)", text):
        text = f"{invalid[1]} is not one of {', '.join(choices)}"
    else:
        text = text.replace("`object", "`mapping").replace("`array", "`list")
        text = text[0].lower() + text[1:]
    return f"{where}: {text}" if where else text


def _choices(expected: Any) -> list[str]:
    """List the values that a ``Literal`` allows, also as part of a union."""
    if typing.get_origin(expected) is Literal:
        return [str(value) for value in typing.get_args(expected)]
    if expected is int:
        return ["a whole number"]
    return [choice for part in typing.get_args(expected) for choice in _choices(part)]


def resolve_stage(name: str) -> str:
    """Return the kind of a stage that is given by its name or its alias.

    Raises:
        ConfigError: there is no such stage.

    >>> resolve_stage("stage1")
    'match'
    """
    stage, names = STAGE_ALIASES.get(name, name), STAGES.names()
    if stage not in names:
        raise ConfigError(f"there is no stage {name!r}{nearest(name, [*names, *STAGE_ALIASES])}", code="unknown_stage")
    return stage
