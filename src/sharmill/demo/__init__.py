"""The demo: a synthetic corpus, and a configuration for it, with run and dataset in one folder."""

from collections.abc import Callable, Sequence
from importlib.resources import as_file, files
from pathlib import Path
from typing import Final

from sharmill.config import Config, load_config, to_yaml
from sharmill.demo.corpus import make_corpus
from sharmill.encode.config import EncodeConfig
from sharmill.errors import ConfigError
from sharmill.files.atomic import write_atomic
from sharmill.files.checksums import checksum_bytes

# The first line of demo.yaml, with the checksum of the others: it tells an edited file from one that may be replaced.
_MARK: Final = "# Written by sharmill demo, with the checksum {}.\n"


def make_demo(directory: Path, overrides: Sequence[str], tell: Callable[[str], None]) -> Config:
    """Make the corpus in ``directory / "corpus"`` unless it is there, and return the configuration for it.

    The configuration is also written to ``directory / "demo.yaml"``. ``tell`` gets lines for the user.

    Raises:
        ConfigError: ``demo.yaml`` was edited, or it or the folder of the corpus is something else.
    """
    paths = [
        f"run_dir={directory / 'run'}",
        f"dataset_dir={directory / 'dataset'}",
        f"sources.0.manifest={directory / 'corpus/manifest.json'}",
        f"sources.0.audio_root={directory / 'corpus/audio'}",
    ]
    with as_file(files("sharmill.demo") / "demo.yaml") as template:
        config = load_config(template, [*paths, *overrides])
    written, text = directory / "demo.yaml", to_yaml(config)
    old = written.read_bytes() if written.exists() else text
    mark, _, rest = old.partition(b"\n")
    if old != text and mark + b"\n" != _MARK.format(checksum_bytes(rest)).encode():
        raise ConfigError(
            f"{written} was edited, or is not this version's: run it with sharmill run {written}, move it away, or "
            "choose another directory",
            code="foreign_output",
        )
    tell(f"making a synthetic corpus in {directory / 'corpus'}")
    corpus = make_corpus(directory / "corpus")
    tell(
        f"{corpus.num_records} records, {corpus.num_bad_records} of them bad on purpose; "
        f"{corpus.audio_seconds / 60:.1f} minutes of speech"
    )
    write_atomic(written, _MARK.format(checksum_bytes(text)).encode() + text)
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
