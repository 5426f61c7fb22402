"""Configuration of one dataset: the dataclasses, and their reading from YAML with ``key=value`` overrides."""

from sharmill.config.loading import load_config, load_typed, resolve_stage, to_config, to_yaml
from sharmill.config.schema import (
    NAME,
    Config,
    MetricsConfig,
    Precision,
    Presence,
    StageSection,
    require,
)

__all__ = [
    "NAME",
    "Config",
    "MetricsConfig",
    "Precision",
    "Presence",
    "StageSection",
    "load_config",
    "load_typed",
    "require",
    "resolve_stage",
    "to_config",
    "to_yaml",
]
