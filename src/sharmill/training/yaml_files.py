"""YAML files of a training: settings of a loader, of a model, and bins."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from sharmill.errors import ConfigError
from sharmill.files.storage import open_regular

if TYPE_CHECKING:
    from omegaconf import DictConfig, ListConfig


def read_yaml(path: str | os.PathLike[str]) -> DictConfig | ListConfig:
    """Return what a YAML file has, with its interpolations still open.

    Raises:
        ConfigError: it is not there, not a regular file, or no YAML.
    """
    import yaml
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        with open_regular(path) as stream:
            return OmegaConf.load(stream)
    except FileNotFoundError as error:
        raise ConfigError(f"cannot read {path}: it is not there", code="missing_input") from error
    except (OSError, ValueError, RecursionError, yaml.YAMLError, OmegaConfBaseException) as error:
        raise ConfigError(f"cannot read {path}: {' '.join(str(error).split())}", code="bad_config_file") from error


def resolve(node: DictConfig | ListConfig, origin: str = "the settings") -> Any:
    """Return the dict or list of a node, with its interpolations in place; ``origin`` names it in messages.

    Raises:
        ConfigError: an interpolation leads nowhere.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        return OmegaConf.to_container(node, resolve=True)
    except (OmegaConfBaseException, RecursionError) as error:
        said = [line.strip() for line in str(error).splitlines() if line.strip()]
        where = next((line for line in said if line.startswith("full_key: ")), "full_key: ").removeprefix("full_key: ")
        at = f" at {where}" if where else ""
        raise ConfigError(f"{origin} cannot be resolved{at}: {said[0]}", code="bad_config_value") from error
