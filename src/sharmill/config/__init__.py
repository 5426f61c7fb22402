"""Configuration of one dataset: the dataclasses, and their reading from YAML with ``key=value`` overrides."""

from sharmill.config.loading import load_config, load_typed, resolve_stage, to_config, to_yaml
from sharmill.config.schema import (
    STAGE_ALIASES,
    STAGES,
    CodecConfig,
    Config,
    EncodeConfig,
    ExecutorConfig,
    MatchConfig,
    MetricsConfig,
    Precision,
    PrepareConfig,
    ValidateConfig,
    WriteConfig,
)
from sharmill.registry import nearest

__all__ = [
    "STAGES",
    "STAGE_ALIASES",
    "CodecConfig",
    "Config",
    "EncodeConfig",
    "ExecutorConfig",
    "MatchConfig",
    "MetricsConfig",
    "Precision",
    "PrepareConfig",
    "ValidateConfig",
    "WriteConfig",
    "load_config",
    "load_typed",
    "nearest",
    "resolve_stage",
    "to_config",
    "to_yaml",
]
