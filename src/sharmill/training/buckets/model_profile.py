"""The step that ``tune-batch`` runs, chosen from its options, and the limits that its batches are made for."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from sharmill.errors import ConfigError
from sharmill.registry import require_package
from sharmill.training.buckets.step_process import Bucket

_NEMO_STEP: Final = "sharmill.training.buckets.nemo_step:NemoStep"
_TOKENS_PER_SECOND: Final = 12.0


@dataclass(frozen=True, kw_only=True)
class ChosenStep:
    """A step by name, with the options of its class.

    Attributes:
        step: ``module:callable``.
        name: the name that users gave it.
        options: arguments of its class.
        profile: settings of the loader, under which no batch takes more than those that were tried.
    """

    step: str
    name: str
    options: dict[str, Any]
    profile: dict[str, Any]


def choose_step(
    buckets: Sequence[Bucket],
    settings: Mapping[str, Any],
    *,
    step: str | None,
    module_name: str | None,
    config_path: str | None,
    pretrained_name: str | None,
    precision: str,
    tokens_per_second: float | None,
) -> ChosenStep:
    """Return the user's own step, or that of a model of NeMo's.

    Args:
        settings: of the file of bins, beside them.

    Raises:
        ConfigError: no step is named, or several; or NeMo is not installed.
    """
    in_tokens = bool(settings.get("use_multimodal_sampling"))
    profile = dict(settings)
    if step is not None:
        if module_name or config_path or pretrained_name:
            raise ConfigError("--step is a step of your own: it takes no model of NeMo's", code="bad_usage")
        # Of a list, only the user knows whether it counts seconds or frames.
        return ChosenStep(step=step, name=step, options={}, profile=_limited(profile, buckets) if settings else {})
    if (config_path is None) == (pretrained_name is None) or (config_path is not None and module_name is None):
        raise ConfigError(
            "name the step: --step MODULE:CALLABLE, or --module-name with --config-path, or --pretrained-name",
            code="bad_usage",
        )
    require_package("nemo")
    if tokens_per_second is None:
        limit = settings.get("max_tps")
        tokens_per_second = float(limit) if isinstance(limit, (int, float)) else _TOKENS_PER_SECOND
    if not in_tokens:
        if buckets[0].num_tokens is None:
            profile["max_tps"] = tokens_per_second
        profile = _limited(profile, buckets)
    elif "token_equivalent_duration" not in settings:
        raise ConfigError(
            "the bins are of text alone, and models of NeMo are tried with speech: write a step of your own, --step",
            code="bad_usage",
        )
    options = {
        "module_name": module_name, "config_path": config_path, "pretrained_name": pretrained_name,
        "tokens_per_second": tokens_per_second, "precision": precision,
        "seconds_per_frame": settings["token_equivalent_duration"] if in_tokens else None,
        "in_total": bool(settings.get("measure_total_length")),
    }  # fmt: skip
    return ChosenStep(step=_NEMO_STEP, name=module_name or str(pretrained_name), options=options, profile=profile)


def _limited(profile: dict[str, Any], buckets: Sequence[Bucket]) -> dict[str, Any]:
    """Return a profile in seconds with the limit of duration; one in tokens as it is."""
    if profile.get("use_multimodal_sampling"):
        return profile
    return profile | {"max_duration": math.ceil(1000 * buckets[-1].length) / 1000}
