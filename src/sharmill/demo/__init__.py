"""The demo: a synthetic corpus, and a configuration for it, with run and dataset in one folder."""

from collections.abc import Callable, Sequence
from importlib.resources import as_file, files
from pathlib import Path

from sharmill.config import Config, load_config, to_yaml
from sharmill.demo.corpus import make_corpus
from sharmill.encode.config import EncodeConfig
from sharmill.files.storage import write_atomic


def make_demo(directory: Path, overrides: Sequence[str], tell: Callable[[str], None]) -> Config:
    """Make the corpus in ``directory / "corpus"`` unless it is there, and return the configuration for it.

    The configuration is also written to ``directory / "demo.yaml"``. ``tell`` gets lines for the user.
    """
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
    if any(codec.model == "builtin" for codec in config.section(EncodeConfig).codecs):
        tell("note: the codec 'builtin' is a small one for trying out: its codes can be heard, but roughly")
    return config


def next_steps(config: Config, command: str = "sharmill") -> str:
    """Return what a user may do after the demo, as lines for the terminal; ``command`` is how sharmill is called."""
    context = ", cut.load_context_audio().shape" if config.has_contexts else ""
    return f"""
What to do next
- look at how the stages went:
    {command} status {config.run_dir}
- read the dataset with lhotse, in Python:
    from sharmill.shar import open_shar
    cut = next(iter(open_shar("{config.dataset_dir}")))
    print(cut.id, cut.load_audio().shape{context})
- use your own speech: copy {Path(config.run_dir).parent / "demo.yaml"} to my.yaml,
  name your manifest, audio_root and folders in it, and
    {command} plan my.yaml
    {command} run my.yaml
  docs/getting_started.md says what a manifest is; docs/configuration.md has
  every key."""
