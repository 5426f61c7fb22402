"""A run with its dataset whose texts and names are hostile, and the page about it."""

from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import msgspec
import torch

from sharmill.config import to_yaml
from sharmill.config.loading import load_for_display
from sharmill.engine.order import make_stages
from sharmill.engine.run_dir import RunDir
from sharmill.pilot.calibration import Calibration
from sharmill.report.facts import read_run_facts
from sharmill.report.page import write_page
from support.project import Project, ToyCodec, voice

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


class Elements(HTMLParser):
    """The elements of a page with their attributes, and its text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.text += data

    def of(self, tag):
        return [attributes for name, attributes in self.found if name == tag]


class DecodingToy(ToyCodec):
    """A toy codec whose audio is a level for each frame: the first codebook in steps of 1/50."""

    decoded_sampling_rate = 16000
    trained = True

    def decode(self, codes, num_frames):
        return codes[:, 0].repeat_interleave(self.samples_per_frame, dim=1).to(torch.float32) / 50


def make_reported(folder: Path) -> Project:
    """A project with run directory and dataset: eight cuts in two shards, two rejects."""
    project = Project(folder)
    for number, text in enumerate(HOSTILE):
        samples = voice(1.0 + 0.25 * number, pitch=150 + 20 * number, seed=number) / (number + 1)
        project.add(f"utt{number}.flac", samples, text=text, speaker=("anna", "ber<b>ta")[number % 2])
    project.add("<img src=x onerror=alert(1)>.flac", text="absent", duration=1.0)
    project.add("utt0.flac", text="", duration=1.0)
    similarities = [0.95 - 0.04 * number for number in range(len(HOSTILE))]
    # One utterance is the context of all others.
    config = project.write(
        [1, *[0] * (len(HOSTILE) - 1)], similarities, write={"shard_size": 5, "order": "manifest"},
        match={"min_duration": 0.0}, encode={"codecs": [{"name": "toy", "model": "builtin"}]},
    )  # fmt: skip
    project.encode(config, codec=DecodingToy())
    RunDir(project.run_dir).config.write_bytes(to_yaml(config))
    return project


def write_report(project: Project, path: Path, models: dict[str, str]) -> Path:
    """The page about the run of a project."""
    config = load_for_display(RunDir(project.run_dir).config)
    write_page(read_run_facts(config, make_stages(config), models), path)
    return path


def note_pilot(run_dir: Path, **changes: Any) -> None:
    """Write the outcome of a pilot into a run directory."""
    values = {
        "name": "small", "seed": 0, "encoder": None, "device": "cpu", "num_records": 1000, "num_drawn": 100,
        "num_groups": 10, "num_partial_groups": 0, "rejects": [], "formats": [], "durations": {},
        "too_short_for_context": 0.0, "advice": None, "similarities": None, "audio_seconds": 1.0, "rates": [],
    }  # fmt: skip
    run_dir.mkdir(exist_ok=True)
    (run_dir / "calibration.json").write_bytes(msgspec.json.encode(Calibration(**(values | changes))))
