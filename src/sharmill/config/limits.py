"""Limits on YAML files, checked before their aliases are expanded: a few lines can stand for more than memory holds."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import yaml

from sharmill.errors import ConfigError

MAX_BYTES = 1 << 20
_MAX_VALUES = 100_000


def check_yaml(path: Path) -> None:
    """Check that a file is YAML of a size that a configuration can have.

    Raises:
        ConfigError: the file is not regular, too large, nested too deeply, or contains itself.
        yaml.YAMLError: the file is not YAML.
        OSError: the file cannot be read.
    """
    # Before opening: a FIFO would wait for its writer, a device may have no end.
    if path.exists() and not path.is_file() and not path.is_dir():
        raise ConfigError(f"{path} is not a regular file", code="bad_config_file")
    with path.open("rb") as stream:
        root = check_yaml_text(stream.read(MAX_BYTES + 1), str(path))
    if root is not None:
        _check_nulls(path, root)


def check_yaml_text(data: bytes, origin: str) -> yaml.Node | None:
    """Return the nodes of YAML of a size that a configuration can have; ``origin`` names it in messages.

    Raises:
        ConfigError: it is too large, nested too deeply, or contains itself.
        yaml.YAMLError: it is not YAML.
    """
    if len(data) > MAX_BYTES:
        raise ConfigError(f"{origin} is larger than 1 MiB: it is no configuration", code="bad_config_file")
    try:
        root = yaml.compose(data, Loader=yaml.SafeLoader)
        count = _count(root, {}) if root is not None else 0
    except RecursionError as error:
        raise ConfigError(
            f"{origin}: values are nested too deeply, or contain themselves", code="bad_config_file"
        ) from error
    if count > _MAX_VALUES:
        raise ConfigError(f"{origin}: its aliases unfold to more than {_MAX_VALUES:,} values", code="bad_config_file")
    return root


def _check_nulls(path: Path, root: yaml.Node) -> None:
    """Raise ConfigError where an audio_root, or match, is empty or ~: its null has a meaning, and has to be said."""
    entries = [value for key, value in _pairs(root) if key.value == "sources" and isinstance(value, yaml.SequenceNode)]
    of_sources = (pair for node in entries for entry in node.value for pair in _pairs(entry))
    root_remedy = "name a folder, or write null to take absolute paths anywhere"
    _require_said(path, "audio_root", of_sources, root_remedy)
    _require_said(path, "match", _pairs(root), "give it keys, or write null for a dataset without contexts")


def _require_said(path: Path, name: str, pairs: Iterable[tuple[yaml.Node, yaml.Node]], remedy: str) -> None:
    for key, value in pairs:
        if key.value == name and value.tag.endswith(":null") and value.value != "null":
            raise ConfigError(
                f"{path}: line {key.start_mark.line + 1}: {name} is {value.value or 'empty'}; {remedy}",
                code="bad_config_value",
            )


def _pairs(node: yaml.Node) -> list[tuple[yaml.Node, yaml.Node]]:
    return node.value if isinstance(node, yaml.MappingNode) else []


def _count(node: yaml.Node, known: dict[int, int]) -> int:
    """Count the values that a node expands to; a node that aliases refer to is counted once and looked up."""
    if id(node) not in known:
        children: list[yaml.Node] = []
        if isinstance(node, yaml.SequenceNode):
            children = node.value
        elif isinstance(node, yaml.MappingNode):
            children = [part for pair in node.value for part in pair]
        known[id(node)] = 1 + sum(_count(child, known) for child in children)
    return known[id(node)]
