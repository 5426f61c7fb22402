"""Reading of YAML that others wrote, in a checkpoint or a run directory."""

from __future__ import annotations

from typing import IO, Any, Final

from sharmill.errors import ConfigError

_MAX_BYTES: Final = 1 << 20
_MAX_DEPTH: Final = 100


def load_untrusted_yaml(stream: IO[bytes], origin: str) -> dict[Any, Any]:
    """Return the mapping in a YAML file that others may have written; ``origin`` names it in messages.

    Raises:
        ConfigError: it is larger than 1 MiB, nested deeper than 100 levels, has aliases, by which a few lines can stand
            for more than memory holds, or is no mapping.
        yaml.YAMLError: it is not YAML, or has tags of Python.
    """
    import yaml

    data = stream.read(_MAX_BYTES + 1)
    if len(data) > _MAX_BYTES:
        raise ConfigError(f"{origin} is larger than 1 MiB: it is no configuration", code="bad_config_file")
    depth = 0
    # By events, which the parser yields without recursion.
    for event in yaml.parse(data, Loader=yaml.SafeLoader):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > _MAX_DEPTH or isinstance(event, yaml.AliasEvent):
            found = "an alias" if isinstance(event, yaml.AliasEvent) else f"more than {_MAX_DEPTH} levels"
            raise ConfigError(
                f"{origin}: line {event.start_mark.line + 1} has {found}, which no configuration that was stored has",
                code="bad_config_file",
            )
    values = yaml.safe_load(data)
    if not isinstance(values, dict):
        raise ConfigError(f"{origin} is no mapping of keys to values", code="bad_config_file")
    return values
