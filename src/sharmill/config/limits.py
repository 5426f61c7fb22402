"""What a YAML file unfolds to, found without doing it: a few lines of aliases can stand for more than memory holds."""

from __future__ import annotations

from pathlib import Path

import yaml

from sharmill.errors import ConfigError

_MAX_BYTES = 1 << 20
_MAX_VALUES = 100_000


def check_yaml(path: Path) -> None:
    """Proves that a file is YAML of a size that a configuration can have.

    Raises:
        ConfigError: it is too large, too deep, or contains itself.
        yaml.YAMLError: it is no YAML.
        OSError: it cannot be read.
    """
    # Before opening: a FIFO would wait for its writer, a device may have no end.
    if path.exists() and not path.is_file() and not path.is_dir():
        raise ConfigError(f"{path} is not a regular file")
    with path.open("rb") as stream:
        data = stream.read(_MAX_BYTES + 1)
    if len(data) > _MAX_BYTES:
        raise ConfigError(f"{path} is larger than 1 MiB: it is no configuration")
    try:
        root = yaml.compose(data, Loader=yaml.SafeLoader)
        count = _count(root, {}) if root is not None else 0
    except RecursionError as error:
        raise ConfigError(f"{path}: values are nested too deeply, or contain themselves") from error
    if count > _MAX_VALUES:
        raise ConfigError(f"{path}: its aliases unfold to more than {_MAX_VALUES:,} values")


def _count(node: yaml.Node, known: dict[int, int]) -> int:
    """How many values a node unfolds to; an alias is the node that it stands for, looked at once."""
    if id(node) not in known:
        children: list[yaml.Node] = []
        if isinstance(node, yaml.SequenceNode):
            children = node.value
        elif isinstance(node, yaml.MappingNode):
            children = [part for pair in node.value for part in pair]
        known[id(node)] = 1 + sum(_count(child, known) for child in children)
    return known[id(node)]
