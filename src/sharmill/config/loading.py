"""Reading of YAML into dataclasses, with ``key=value`` overrides and errors that name the file and the key.

Configurations of datasets, cluster profiles and the training example are read with these functions.
"""

from __future__ import annotations

import dataclasses
import re
import types
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, TypeVar

import msgspec

from sharmill.config.references import References
from sharmill.config.schema import STAGE_ALIASES, STAGES, Config, Source
from sharmill.config.untrusted import load_untrusted_yaml
from sharmill.errors import ConfigError
from sharmill.files.storage import NotRegularError, open_regular
from sharmill.registry import SOURCES, nearest

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
# Keys whose null has to be written out, and what to write.
_MEANT_NULLS: Final = {
    "audio_root": "name a folder, or write null to take absolute paths anywhere",
    "match": "give it keys, or write null for a dataset without contexts",
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
    >>> config.write.shard_size
    20
    """
    return load_typed(Config, path, overrides)


def load_for_display(path: Path) -> Config:
    """Read the configuration that a run has stored, to show the run: a stand-in takes the place of its sources.

    The type of a source may name code of another package, which is not imported to show progress; so may a model, whose
    options are left out.
    """
    values, _ = _read_merged(Config, path, (), for_display=True)
    values = _gather_options(Config, values, keep=False)
    return to_config(values | {"sources": [{"manifest": "not read", "audio_root": "not read"}]}, str(path))


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
    >>> config.match.encoder
    'resemblyzer'
    """
    return _to_typed(Config, values, origin)


def to_yaml(config: Config) -> bytes:
    """Return the whole configuration, defaults included, as YAML that ``load_config`` reads.

    References are written as they were, since the environment may hold secrets.
    """
    from omegaconf import OmegaConf

    return OmegaConf.to_yaml(OmegaConf.create(config.references.put_back(to_plain(config)))).encode()


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
            _check_section(kind, config, key, f"{path}: {override}")
            types = [entry.get("type") for entry in _entries(OmegaConf.to_container(config))]
            OmegaConf.update(config, key, _override_value(value, _type_at(kind, key, types)))
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
    """Raise ConfigError where an audio_root, or match, is empty or ~: its null has a meaning, and has to be said."""
    top = _pairs(root)
    of_sources = (
        pair for key, value in top if key.value == "sources" for entry in value.value for pair in _pairs(entry)
    )
    for key, value in (*top, *of_sources):
        if value.tag.endswith(":null") and value.value != "null" and (remedy := _MEANT_NULLS.get(key.value)):
            raise ConfigError(
                f"{path}: line {key.start_mark.line + 1}: {key.value} is {value.value or 'empty'}; {remedy}",
                code="bad_config_value",
            )


def _pairs(node: object) -> list[tuple[Node, Node]]:
    import yaml

    return node.value if isinstance(node, yaml.MappingNode) else []


def _check_section(kind: type, config: Any, key: str, origin: str) -> None:
    """Raise ConfigError where a key of a section is overridden that is null, which leaves out all that it is about."""
    section, dot, _ = key.partition(".")
    may_be_null = type(None) in typing.get_args(typing.get_type_hints(kind).get(section))
    if dot and may_be_null and section in config and config[section] is None:
        raise ConfigError(f"{origin}: {section} is null; leave this out, or null", code="bad_config_value")


def _to_typed(kind: type[Loaded], values: dict[str, Any], origin: str) -> Loaded:
    _check_keys(kind, values, origin, "")
    if kind is Config:
        made = [_make_source(entry, number, origin) for number, entry in enumerate(_entries(values))]
        values = values | {"sources": made} if made else values
    _check_controls(values, origin, "")
    values = _gather_options(kind, values)
    try:
        # Not strict: a number may be quoted, and YAML takes 1e3 for text.
        return msgspec.convert(values, kind, strict=False, dec_hook=lambda _, source: source)
    except msgspec.ValidationError as error:
        raise _refusal(kind, error, origin) from error


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


def _refusal(kind: type, error: msgspec.ValidationError, origin: str, prefix: str = "") -> ConfigError:
    code = "missing_key" if "missing required field" in str(error) else "bad_config_value"
    return ConfigError(f"{origin}: {_readable(kind, str(error), prefix)}", code=code)


def _entries(values: Any) -> list[dict[str, Any]]:
    """Return the entries of ``sources``, or nothing where they are not mappings, which is refused later."""
    entries = values.get("sources") if isinstance(values, dict) else None
    return entries if isinstance(entries, list) and all(isinstance(entry, dict) for entry in entries) else []


def _make_source(entry: dict[str, Any], number: int, origin: str) -> Source:
    """Return the source that an entry of ``sources`` describes."""
    kind = _source_type(entry.get("type"), number, origin)
    try:
        return msgspec.convert(entry, kind, strict=False)
    except msgspec.ValidationError as error:
        raise _refusal(kind, error, origin, f"sources[{number}]") from error


def _source_type(name: Any, number: int, origin: str) -> type[Source]:
    """Return the class of a type of sources; ``nemo`` if none is named."""
    where = f"{origin}: sources[{number}].type"
    try:
        kind = SOURCES.load("nemo" if name is None else str(name))
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}", code=error.code) from error
    if not (isinstance(kind, type) and hasattr(kind, "pieces") and dataclasses.is_dataclass(kind)):
        raise ConfigError(f"{where}: {name} is not a dataclass derived from sharmill.sources.Source", code="bad_plugin")
    return Source.register(typing.cast("type[Source]", kind))


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


def _type_at(kind: type, key: str, source_types: Sequence[Any] = ()) -> Any:
    """Return the type declared for a key such as ``sources[0].manifest`` or ``sources.0.manifest``, or None.

    ``source_types`` are the types that the sources of the configuration name.
    """
    owner: Any = kind
    for part in re.findall(r"[^.\[\]]+", key):
        if typing.get_origin(owner) is list:
            owner = typing.get_args(owner)[0]
            if owner is Source and part.isdigit() and int(part) < len(source_types):
                owner = _source_type(source_types[int(part)], int(part), key)
            if part.isdigit():
                continue
        owner = _without_null(owner)
        if dataclasses.is_dataclass(owner):
            owner = typing.get_type_hints(owner).get(part)
        else:
            owner = typing.get_args(owner)[1] if typing.get_origin(owner) is dict else None
    return owner


def _without_null(kind: Any) -> Any:
    """Return the section that a section or ``null`` is declared as; any other type as it is."""
    sections = [part for part in typing.get_args(kind) if dataclasses.is_dataclass(part)]
    return sections[0] if sections and typing.get_origin(kind) in (typing.Union, types.UnionType) else kind


def _check_keys(owner: Any, values: Any, origin: str, prefix: str) -> None:
    """Raise ConfigError for the first key that the dataclass ``owner``, or one within it, does not have."""
    owner = _without_null(owner)
    if typing.get_origin(owner) is list and isinstance(values, list):
        for number, value in enumerate(values):
            item = typing.get_args(owner)[0]
            if item is Source and isinstance(value, dict):
                item = _source_type(value.get("type"), number, origin)
            _check_keys(item, value, origin, f"{prefix.rstrip('.')}[{number}].")
    if not dataclasses.is_dataclass(owner) or not isinstance(values, dict):
        return
    types = _types_of_keys(owner)
    options = _types_of_options(owner, values, f"{origin}: {prefix.rstrip('.')}")
    types |= options
    for key, value in values.items():
        if key in options:
            try:
                msgspec.convert(value, options[key], strict=False)
            except msgspec.ValidationError as error:
                raise _refusal(options[key], error, origin, f"{prefix}{key}") from error
        elif key not in types:
            if removed := _REMOVED_KEYS.get(f"{prefix}{key}"):
                raise ConfigError(f"{origin}: the key '{prefix}{key}' was removed: {removed}", code="unknown_key")
            meant = nearest(str(key), list(types)) if prefix else _nearest_below(str(key), types)
            raise ConfigError(f"{origin}: unknown key '{prefix}{key}'{meant}", code="unknown_key")
        _check_keys(types[key], value, origin, f"{prefix}{key}.")


def _types_of_keys(owner: Any) -> dict[str, Any]:
    """Return the types of the keys of a section by their names, but of no options of a model."""
    types = typing.get_type_hints(owner)
    if hasattr(owner, "options_of"):
        del types[_OPTIONS]
    return types


def _types_of_options(owner: Any, values: dict[str, Any], where: str) -> dict[str, Any]:
    """Return the types of the options beside the keys of a section, if there are any: those of the model it names.

    Raises:
        ConfigError: there is no such model, or it has an option that is a key of the section.
    """
    keys = _types_of_keys(owner).keys()
    if not hasattr(owner, "options_of") or values.keys() <= keys:
        return {}
    registry, key = owner.options_of
    if not (name := values.get(key, getattr(owner, key, None))):
        return {}
    try:
        family = registry.load(registry.split(str(name))[0])
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}", code=error.code) from error
    options: dict[str, Any] = family.options() if hasattr(family, "options") else {}
    if taken := sorted(options.keys() & keys):
        raise ConfigError(f"{where}: the model's option {taken[0]!r} is another key already", code="bad_plugin")
    return options


def _gather_options(owner: Any, values: Any, *, keep: bool = True) -> Any:
    """Return values in which options beside the keys of a section are one value of it, or left out."""
    owner = _without_null(owner)
    if typing.get_origin(owner) is list and isinstance(values, list):
        return [_gather_options(typing.get_args(owner)[0], value, keep=keep) for value in values]
    if not dataclasses.is_dataclass(owner) or not isinstance(values, dict):
        return values
    types = _types_of_keys(owner)
    values = {key: _gather_options(types.get(key), value, keep=keep) for key, value in values.items()}
    if not hasattr(owner, "options_of"):
        return values
    options = {key: value for key, value in values.items() if key not in types}
    own = {key: value for key, value in values.items() if key in types}
    return own | {_OPTIONS: options} if keep else own


def to_plain(value: Any) -> Any:
    """Return a configuration as plain values, with options beside the keys of their sections again."""
    if isinstance(value, list):
        return [to_plain(item) for item in value]
    if not dataclasses.is_dataclass(value):
        return value
    plain = {field.name: to_plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    return plain | plain.pop(_OPTIONS) if hasattr(value, "options_of") else plain


def _nearest_below(name: str, types: dict[str, Any]) -> str:
    """Return the end of a sentence about a key that the top of a configuration lacks; a section may have it."""
    below = []
    for section, owner in types.items():
        if typing.get_origin(owner) is list:
            section, owner = f"{section}[0]", typing.get_args(owner)[0]
        if name in getattr(_without_null(owner), "__annotations__", ()):
            below.append(f"'{section}.{name}'")
    return f"; did you mean {' or '.join(below)}?" if below else nearest(name, list(types))


def _readable(kind: type, message: str, prefix: str = "") -> str:
    """Rewrite a message of msgspec, ``... - at `$.match.min_similarity```, with the key first, in words of YAML."""
    text, _, where = message.partition(" - at `$")
    where = where.strip("`.").replace("[...]", "")
    if missing := re.fullmatch(r"Object missing required field `(.*)`", text):
        text = f"the key '{missing[1]}' is missing"
    elif invalid := re.fullmatch(r"Invalid enum value (.*)", text):
        text = f"{invalid[1]} is not one of {', '.join(_choices(_type_at(kind, where)))}"
    else:
        text = text.replace("`object", "`mapping").replace("`array", "`list")
        text = text[0].lower() + text[1:]
    where = ".".join(part for part in (prefix, where) if part)
    return f"{where}: {text}" if where else text


def _choices(expected: Any) -> list[str]:
    """List the values that a ``Literal`` allows, also as part of a union."""
    if typing.get_origin(expected) is Literal:
        return [str(value) for value in typing.get_args(expected)]
    if expected is int:
        return ["a whole number"]
    return [choice for part in typing.get_args(expected) for choice in _choices(part)]


def resolve_stage(name: str) -> str:
    """Return the name of a stage that is given by its name or its alias.

    Raises:
        ConfigError: there is no such stage.

    >>> resolve_stage("stage1")
    'match'
    """
    stage = STAGE_ALIASES.get(name, name)
    if stage not in STAGES:
        raise ConfigError(f"there is no stage {name!r}{nearest(name, [*STAGES, *STAGE_ALIASES])}", code="unknown_stage")
    return stage
