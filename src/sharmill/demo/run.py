"""The demo as a configuration: corpus, run and dataset in one folder."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.resources import as_file, files
from pathlib import Path

from sharmill.config import Config, load_config, to_yaml
from sharmill.demo.corpus import make_corpus
from sharmill.storage import write_atomic


def make_demo(directory: Path, overrides: Sequence[str], tell: Callable[[str], None]) -> Config:
    """Makes the corpus in ``directory / "corpus"`` unless it is there, and returns the configuration for it, which is
    also left as ``directory / "demo.yaml"``. ``tell`` gets lines for the user."""
    tell(f"making a synthetic corpus in {directory / 'corpus'}")
    corpus = make_corpus(directory / "corpus")
    tell(
        f"{corpus.num_records} records, {corpus.num_bad_records} of them bad on purpose; "
        f"{corpus.audio_seconds / 60:.1f} minutes of speech"
    )
    paths = [
        f"run_dir={directory / 'run'}",
        f"dataset_dir={directory / 'dataset'}",
        f"sources.0.manifest={corpus.manifest}",
        f"sources.0.audio_root={corpus.audio_root}",
    ]
    with as_file(files("sharmill.demo") / "demo.yaml") as template:
        config = load_config(template, [*paths, *overrides])
    write_atomic(directory / "demo.yaml", to_yaml(config))
    if any(codec.model == "builtin" for codec in config.encode.codecs):
        tell(
            "note: the codec 'builtin' is UNTRAINED: its codes show the form of a dataset and are of no use in training"
        )
    return config
