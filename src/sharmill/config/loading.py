"""Reading of configurations: YAML, ``key=value`` overrides, and errors that name file, key and the nearest valid key.

Any of the program's dataclasses can be read so: configurations of datasets and cluster profiles.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec

from sharmill.config.schema import STAGE_ALIASES, STAGES, Config
from sharmill.errors import ConfigError

Loaded = TypeVar("Loaded")


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Reads a YAML file, applies ``key=value`` overrides (``match.min_similarity=0.7``) and checks everything.

    Raises:
        ConfigError: with the file, the key and what to change.
    """
    return load_typed(Config, path, overrides)


def load_typed(kind: type[Loaded], path: str | Path, overrides: Sequence[str] = ()) -> Loaded:
    """A YAML file as the dataclass ``kind``, with the same overrides, checks and errors as a configuration."""
    return _to_typed(kind, _read_merged(kind, Path(path), overrides), str(path))


def to_config(values: dict[str, Any], origin: str) -> Config:
    """The typed configuration of plain values that came from ``origin``."""
    return _to_typed(Config, values, origin)


def to_yaml(config: Config) -> bytes:
    """The whole configuration, with its defaults, as YAML that ``load_config`` reads."""
    from omegaconf import OmegaConf

    return OmegaConf.to_yaml(OmegaConf.create(dataclasses.asdict(config))).encode()


def _read_merged(kind: type, path: Path, overrides: Sequence[str]) -> dict[str, Any]:
    import yaml
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    from sharmill.config.limits import check_yaml

    try:
        check_yaml(path)
        config = OmegaConf.load(path)
        for override in overrides:
            key, _, value = override.partition("=")
            OmegaConf.update(config, key, _override_value(value, _type_at(kind, key)))
        values = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    except FileNotFoundError as error:
        raise ConfigError(f"there is no configuration file {path}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from error
    except (OmegaConfBaseException, ValueError, AttributeError, TypeError) as error:
        raise ConfigError(f"{path}: {' '.join(str(error).split())}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: a configuration is a mapping of keys to values")
    return typing.cast("dict[str, Any]", values)


def _to_typed(kind: type[Loaded], values: dict[str, Any], origin: str) -> Loaded:
    _check_keys(kind, values, origin, "")
    try:
        # Not strict: a number may be quoted, and YAML takes 1e3 for text.
        return msgspec.convert(values, kind, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{origin}: {_readable(kind, str(error))}") from error


def _override_value(text: str, expected: Any) -> Any:
    """What the right side of an override means: YAML, or the text itself where text is asked for.

    ``name=0123`` is a name, and what is no YAML is text as well: ``prepare.filters.cer=>= 3``, ``speaker_key=[^/]+``.
    """
    import yaml

    if expected is str and text and text[0] not in "'\"":
        # Text as it stands, be it like a number or with a '#' in it.
        return text
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        return text
    return text if expected is str and value is not None and not isinstance(value, str) else value


def _type_at(kind: type, key: str) -> Any:
    """The type declared for a key such as ``sources[0].manifest`` or ``sources.0.manifest``; None if there is none."""
    owner: Any = kind
    for part in re.findall(r"[^.\[\]]+", key):
        if typing.get_origin(owner) is list:
            owner = typing.get_args(owner)[0]
            if part.isdigit():
                continue
        if dataclasses.is_dataclass(owner):
            owner = typing.get_type_hints(owner).get(part)
        else:
            owner = typing.get_args(owner)[1] if typing.get_origin(owner) is dict else None
    return owner


def _check_keys(owner: Any, values: Any, origin: str, prefix: str) -> None:
    """Walks the values beside the dataclasses and stops at the first key that no dataclass has."""
    if typing.get_origin(owner) is list and isinstance(values, list):
        for number, value in enumerate(values):
            _check_keys(typing.get_args(owner)[0], value, origin, f"{prefix.rstrip('.')}[{number}].")
    if not dataclasses.is_dataclass(owner) or not isinstance(values, dict):
        return
    types = typing.get_type_hints(owner)
    for key, value in values.items():
        if key not in types:
            raise ConfigError(f"{origin}: unknown key '{prefix}{key}'{nearest(str(key), list(types))}")
        _check_keys(types[key], value, origin, f"{prefix}{key}.")


def nearest(name: str, valid: list[str]) -> str:
    """What to say after a name that is not valid: the one probably meant, or all."""
    close = difflib.get_close_matches(name, valid, n=1, cutoff=0.4)
    return f"; did you mean '{close[0]}'?" if close else f"; the valid names are {', '.join(valid)}"


def _readable(kind: type, message: str) -> str:
    """msgspec's ``... - at `$.match.min_similarity``` with the key first, in the words of YAML."""
    text, _, where = message.partition(" - at `$")
    where = where.strip("`.").replace("[...]", "")
    if missing := re.fullmatch(r"Object missing required field `(.*)`", text):
        text = f"the key '{missing[1]}' is missing"
    elif invalid := re.fullmatch(r"Invalid enum value (.*)", text):
        text = f"{invalid[1]} is not one of {', '.join(_choices(_type_at(kind, where)))}"
    else:
        text = text.replace("`object`", "`mapping`").replace("`array`", "`list`")
        text = text[0].lower() + text[1:]
    return f"{where}: {text}" if where else text


def _choices(expected: Any) -> list[str]:
    """The values that a ``Literal`` allows, also as part of a union."""
    if typing.get_origin(expected) is Literal:
        return [str(value) for value in typing.get_args(expected)]
    if expected is int:
        return ["a whole number"]
    return [choice for part in typing.get_args(expected) for choice in _choices(part)]


def resolve_stage(name: str) -> str:
    """The stage of a name or an alias (``stage1``).

    Raises:
        ConfigError: there is no such stage.
    """
    stage = STAGE_ALIASES.get(name, name)
    if stage not in STAGES:
        raise ConfigError(f"there is no stage {name!r}{nearest(name, [*STAGES, *STAGE_ALIASES])}")
    return stage
