"""A run with its dataset to report on, whose texts and names are hostile, and the command line in this process."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from support.shar import Project, ToyCodec, voice

from sharmill.cli.main import main
from sharmill.config import to_yaml
from sharmill.engine.rundir import RunDir

# Each is text on the page, and nothing else.
HOSTILE = (
    "<script>document.title='owned'</script>",
    '" onmouseover="document.title=\'owned\'" x="',
    "'><img src=x onerror=document.title='owned'>",
    "</style><style>*{display:none}</style>",
    "{{ 7 * 7 }} {% raw %} &amp; &lt;b&gt;",
    "\u202egnirts desrever\u202c שלום עולם مرحبا",
    "\x1b[31mred\x1b[0m\x07\x9b2J\b\r\x7f",
    "wort " * 20_000,
)


class DecodingToy(ToyCodec):
    """A toy codec whose audio is a level for each frame: the first codebook in steps of 1/50."""

    decoded_sampling_rate = 16000
    trained = True

    def decode(self, codes, num_frames):
        return codes[:, 0].repeat_interleave(self.samples_per_frame, dim=1).to(torch.float32) / 50


@pytest.fixture(scope="session")
def reported(tmp_path_factory):
    """A project with run directory and dataset: eight cuts in two shards, two rejects; not to be changed by tests."""
    project = Project(tmp_path_factory.mktemp("reported"))
    for number, text in enumerate(HOSTILE):
        samples = voice(1.0 + 0.25 * number, pitch=150 + 20 * number, seed=number) / (number + 1)
        project.add(f"utt{number}.flac", samples, text=text, speaker=("anna", "ber<b>ta")[number % 2])
    project.add("<img src=x onerror=alert(1)>.flac", text="absent", duration=1.0)
    project.add("utt0.flac", text="", duration=1.0)
    similarities = [0.95 - 0.04 * number for number in range(len(HOSTILE))]
    # Of one context for all but itself.
    config = project.write(
        [1, *[0] * (len(HOSTILE) - 1)], similarities, write={"shard_size": 5, "order": "manifest"},
        match={"min_duration": 0.0}, encode={"codecs": [{"name": "toy", "model": "untrained"}]},
    )  # fmt: skip
    project.encode(config, codec=DecodingToy())
    RunDir(project.run_dir).config.write_bytes(to_yaml(config))
    return project


@pytest.fixture
def toy():
    """The codec that made the codes is what is loaded, whatever its name."""
    with mock.patch("sharmill.models.recorded.load_codec", return_value=DecodingToy()) as load:
        yield load


@pytest.fixture
def call(capsys, monkeypatch):
    """Calls a command in this process; returns its exit status, and what it printed on both streams."""
    monkeypatch.setattr("signal.signal", lambda *arguments: None)
    monkeypatch.setenv("COLUMNS", "200")

    def run(*arguments):
        with pytest.raises(SystemExit) as ended:
            main([str(argument) for argument in arguments])
        printed = capsys.readouterr()
        return ended.value.code, printed.out, printed.err

    return run
