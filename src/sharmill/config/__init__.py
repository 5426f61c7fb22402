"""Configuration of one dataset: dataclasses, and functions that read them from YAML with ``key=value`` overrides."""

from sharmill.config.loading import load_config, load_for_display, load_typed, resolve_stage, to_config, to_yaml
from sharmill.config.schema import (
    NAME,
    NAME_RULE,
    Above0,
    Config,
    MetricsConfig,
    NotNegative,
    Positive,
    Precision,
    Presence,
    References,
    Share,
    StageSection,
    require,
)

__all__ = [
    "NAME",
    "NAME_RULE",
    "Above0",
    "Config",
    "MetricsConfig",
    "NotNegative",
    "Positive",
    "Precision",
    "Presence",
    "References",
    "Share",
    "StageSection",
    "load_config",
    "load_for_display",
    "load_typed",
    "require",
    "resolve_stage",
    "to_config",
    "to_yaml",
]
