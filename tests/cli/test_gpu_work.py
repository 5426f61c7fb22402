"""GPU utilization, bottlenecks and necessary cores in ``status``, in ``plan`` and on the page.

The GPU is simulated: the stage treats its device as a GPU.
"""

import time
from unittest import mock

import pytest
import torch
from support.project import Project, run, stage_of, voice

from sharmill.config import to_yaml

KIND = "NVIDIA H200, capability 9.0"


class Slow:
    """An encoder that takes some seconds for a second of audio, and gives all the same voice."""

    sampling_rate = 16000
    embedding_size = 2
    checksum = "slow"

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def embed(self, audio: torch.Tensor, num_samples: torch.Tensor) -> torch.Tensor:
        time.sleep(self.seconds * audio.numel() / self.sampling_rate)
        return torch.tensor([[1.0, 0.0]]).expand(len(audio), 2)


def page_of(call, project):
    status, _, errors = call("report", project.run_dir)
    assert status == 0, errors
    return (project.run_dir / "report.html").read_text()


@pytest.fixture
def matched(tmp_path):
    """Returns a function that runs match on a GPU that takes some seconds for a second of audio."""

    def match(seconds, **options):
        project = Project(tmp_path)
        project.add_voices([3.5] * 6)
        config = project.configure(match={"min_similarity": -1.0, "encoder": "resemblyzer"} | options)
        project.prepare(config)
        with (
            mock.patch("sharmill.match.stage.check_device", return_value=KIND),
            mock.patch("sharmill.match.stage.load_speaker_encoder", return_value=Slow(seconds)),
        ):
            assert run(stage_of(config, "match")).ok
        (tmp_path / "config.yaml").write_bytes(to_yaml(config))
        (project.run_dir / "resolved_config.yaml").write_bytes(to_yaml(config))
        return project

    return match


def test_a_gpu_that_waits_is_told_with_what_it_waits_for(matched, call):
    project = matched(1e-6)
    status, out, _ = call("status", project.run_dir)
    assert status == 0
    assert "match: its GPUs are busy" in " ".join(out.split())
    assert "executor.feeders" in out or "unit_seconds" in out
    assert "GPU utilization of match, by rank" in page_of(call, project)


def test_a_gpu_that_works_is_told_nothing_and_needs_few_cores(matched, call):
    project = matched(0.1)
    _, out, _ = call("status", project.run_dir)
    assert "its GPUs are busy" not in out
    assert "GPU utilization of match, by rank" in page_of(call, project)
    _, out, _ = call("plan", project.folder / "config.yaml")
    assert "cores needed to keep one GPU busy: match 2" in " ".join(out.split())


def test_on_cores_none_of_it_is_said(tmp_path, call):
    project = Project(tmp_path)
    for number in range(3):
        project.add(f"{number}.flac", voice(3.5, seed=number))
    config = project.configure(match={"min_similarity": -1.0, "encoder": "resemblyzer"})
    project.prepare(config)
    with mock.patch("sharmill.match.stage.load_speaker_encoder", return_value=Slow(1e-6)):
        assert run(stage_of(config, "match")).ok
    (project.run_dir / "resolved_config.yaml").write_bytes(to_yaml(config))
    _, out, _ = call("status", project.run_dir)
    assert "GPU" not in out.replace("on GPUs", "")
    assert "GPU utilization" not in page_of(call, project)
