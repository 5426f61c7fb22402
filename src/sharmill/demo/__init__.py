"""Demo: a synthetic corpus, its configuration, its run directory and its dataset, all in one folder."""

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

# First line of demo.yaml, with the checksum of the remaining lines. It shows whether a user has edited the file; an
# edited file must not be replaced.
_MARK: Final = "# Written by sharmill demo, with the checksum {}.\n"


def make_demo(directory: Path, overrides: Sequence[str], print_line: Callable[[str], None]) -> Config:
    """Create the corpus in ``directory / "corpus"`` if necessary, and return its configuration.

    The configuration is also written to ``directory / "demo.yaml"``.

    Args:
        print_line: function that prints a line for the user.

    Raises:
        ConfigError: ``demo.yaml`` was edited, or the folder contains other files.
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
            f"{written} was edited or written by another version: run it with sharmill run {written}, move it away, or "
            "choose another directory",
            code="foreign_output",
        )
    print_line(f"creating a synthetic corpus in {directory / 'corpus'}")
    corpus = make_corpus(directory / "corpus")
    print_line(
        f"{corpus.num_records} records, including {corpus.num_bad_records} deliberately bad ones; "
        f"{corpus.audio_seconds / 60:.1f} minutes of speech"
    )
    write_atomic(written, _MARK.format(checksum_bytes(text)).encode() + text)
    if any(codec.model == "builtin" for codec in config.section(EncodeConfig).codecs):
        print_line("note: the codec 'builtin' is a small codec for demonstrations, with low audio quality")
    return config


def next_steps(config: Config, command: str = "sharmill") -> str:
    """Return suggestions for the user after the demo, as lines for the terminal.

    Args:
        command: the command that calls sharmill.
    """
    context = ", cut.load_context_audio().shape" if config.has_contexts else ""
    return f"""
What to do next
- show the progress and results of the stages:
    {command} status {config.run_dir}
- read the dataset with lhotse, in Python:
    from sharmill.shar import open_shar
    cut = next(iter(open_shar("{config.dataset_dir}")))
    print(cut.id, cut.load_audio().shape{context})
- use your own speech: copy {Path(config.run_dir).parent / "demo.yaml"} to my.yaml,
  set manifest, audio_root and the folders in it, and run
    {command} plan my.yaml
    {command} run my.yaml
  docs/getting_started.md explains manifests; docs/configuration.md lists
  all keys."""
