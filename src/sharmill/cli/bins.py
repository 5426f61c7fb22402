"""``sharmill bins``: buckets for batches."""

from __future__ import annotations

from typing import Any

import click

from sharmill.cli.arguments import parse_workers, workers_option
from sharmill.cli.console import json_option, print_yaml
from sharmill.cli.exit_status import OK


@click.command()
@click.argument("sources", nargs=-1, required=True, metavar="SOURCE...", type=click.Path(path_type=str))
@click.option("-b", "--buckets", "num_buckets", default=30, show_default=True, help="How many buckets by length.")
@click.option("-s", "--sub-buckets", type=int, help="Divide each into this many by number of text tokens.")
@click.option("-t", "--tokenizer", multiple=True, metavar="[LANGUAGE=]NAME",
              help="bytes, chars, a tokenizer.json, a SentencePiece .model, or module:callable.")  # fmt: skip
@click.option("--tokens", "token_bins", is_flag=True, help="Count audio in frames, for token-based sampling.")
@click.option("--token-equivalent-duration", "seconds_per_frame", type=click.FloatRange(0, min_open=True),
              help="Seconds of a frame (default: the codec's).")  # fmt: skip
@click.option("--closed", is_flag=True, help="End with the longest cut, as bucket_batch_size and tune-batch need it.")
@click.option("--min-duration", default=0.0, help="Leave out shorter cuts (seconds).")
@click.option("--max-duration", default=float("inf"), help="Leave out longer cuts (seconds; default: no limit).")
@click.option("--token-outlier-threshold", "outlier_threshold", default=4.0, show_default=True,
              help="Texts are too long this many standard deviations of tokens per second above the mean.")  # fmt: skip
@click.option("--prompt-format", help="Count the tokens of texts in this prompt format of NeMo's, such as canary.")
@click.option("--prompt", metavar="TURNS",
              help="One prompt for all speech: [{'role': 'user', 'slots': {...}}] (default: of each cut).")  # fmt: skip
@click.option("--section", metavar="NAME", help="The sampler of a multi_config to make bins for.")
@click.option("--samples", type=click.IntRange(1), default=100_000, show_default=True,
              help="Examples to look at, of data that are no folders of datasets.")  # fmt: skip
@workers_option
@json_option
def bins(sources: tuple[str, ...], tokenizer: tuple[str, ...], token_bins: bool, min_duration: float,
         max_duration: float, workers: str, as_json: bool, prompt_format: str | None, prompt: str | None,
         section: str | None, samples: int, **options: Any) -> int:  # fmt: skip
    """Estimate buckets for batches from lengths alone.

    SOURCE is a folder of a dataset or another Shar, a NeMo manifest (also as a range of shards), a text, the YAML of a
    training or of an input_cfg, or a list with weights: [[a.json,0.7],[b.json,0.3]].

    Prints YAML for NeMo's loader, with a histogram as comments: sharmill bins DATASET --closed > bins.yaml
    """
    from sharmill.training.buckets.report import BinsOptions, MixtureOptions, estimate_report

    report = estimate_report(
        sources, BinsOptions(**options), tokenizer=tokenizer, token_bins=token_bins, min_duration=min_duration,
        max_duration=max_duration, workers=parse_workers(workers),
        mixture=MixtureOptions(prompt_format=prompt_format, prompt=prompt, section=section, samples=samples),
    )  # fmt: skip
    print_yaml(report, as_json=as_json)
    return OK
