"""``sharmill tune-batch``: the batch size of each bucket."""

from __future__ import annotations

from typing import Any

import click

from sharmill.cli.console import json_option, print_yaml
from sharmill.cli.exit_status import OK


@click.command("tune-batch")
@click.option("--step", metavar="MODULE:CALLABLE",
              help="Runs one step: step(batch_size, length, num_tokens, device), or a class of such.")  # fmt: skip
@click.option("--module-name", metavar="MODULE.CLASS",
              help="A class of NeMo's, as nemo.collections.asr.models.EncDecCTCModel; with --config-path.")  # fmt: skip
@click.option("--config-path", metavar="FILE", help="The YAML of its training, with the section model.")
@click.option("--pretrained-name", metavar="NAME", help="A .nemo file, or the name of a model of NeMo's, instead.")
@click.option("--precision", type=click.Choice(["fp32", "bf16"]), default="bf16", show_default=True,
              help="Of NeMo's models.")  # fmt: skip
@click.option("--tokens-per-second", type=click.FloatRange(0, min_open=True),
              help="Of text, in batches for bins of one dimension (default: max_tps of the bins, or 12).")  # fmt: skip
@click.option("--bins", "bins_text", required=True, metavar="FILE|LIST",
              help="What sharmill bins --closed printed, or [1.5, 3.0].")  # fmt: skip
@click.option("--memory-share", default=0.9, show_default=True, help="Share of the memory to use.")
@click.option("--memory", help="Of how much, as in 8GiB (default: all of the GPU, or what is available to the CPU).")
@click.option("--device", default="auto", show_default=True, help="auto, cpu, or cuda:0.")
@click.option("--max-batch-size", type=click.IntRange(1), default=4096, show_default=True, help="Ask for no more.")
@click.option("--tolerance", type=click.FloatRange(0, 1, max_open=True), default=0.0, show_default=True,
              help="Stop when the gap between fitting and not is at most this share.")  # fmt: skip
@click.option("--timeout", type=click.FloatRange(0, min_open=True), default=1800.0, show_default=True,
              help="Seconds that the steps of one size may take.")  # fmt: skip
@json_option
def tune_batch(
    step: str | None, bins_text: str, memory_share: float, memory: str | None, device: str, as_json: bool,
    module_name: str | None, config_path: str | None, pretrained_name: str | None, precision: str,
    tokens_per_second: float | None, **options: Any,
) -> int:  # fmt: skip
    """Find the largest batch of each bucket that fits.

    Runs a training step with larger and larger made-up batches, until it has not enough memory, and prints YAML for
    NeMo's loader. The step is your own, or that of a model of NeMo's.
    """
    from sharmill.training.buckets.batch_size import (
        batch_sizes_to_yaml,
        make_budget,
        read_bin_settings,
        read_buckets,
        tune_batch_sizes,
    )
    from sharmill.training.buckets.model_profile import choose_step
    from sharmill.training.buckets.step_process import parse_memory

    buckets, settings = read_buckets(bins_text), read_bin_settings(bins_text)
    chosen = choose_step(
        buckets, settings, step=step, module_name=module_name, config_path=config_path, pretrained_name=pretrained_name,
        precision=precision, tokens_per_second=tokens_per_second,
    )  # fmt: skip
    budget = make_budget(device, memory_share, parse_memory(memory) if memory else None)
    click.echo(f"searching within {budget}", err=True)
    most = options["max_batch_size"]
    sizes = tune_batch_sizes(
        chosen.step, buckets, budget, **options, step_options=chosen.options,
        tell=lambda bucket, size: click.echo(f"{bucket}: {size}{' or more' * (size == most)}", err=True),
        tell_try=lambda bucket, size, fits: click.echo(f"  {size} {'fits' if fits else 'does not fit'}", err=True),
    )  # fmt: skip
    print_yaml(batch_sizes_to_yaml(chosen.name, buckets, sizes, budget, chosen.profile), as_json=as_json)
    return OK
