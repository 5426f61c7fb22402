"""Parts of other libraries that they do not promise to keep: one line each, and the library to look at when it fails.

Each is something that sharmill reads, fills or calls beyond a library's documentation. When a test fails after an
update, read the file of sharmill that the test names, beside the library's new version, and bound the library in
pyproject.toml by what works.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
import inspect
import os
import re
import tomllib
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import soundfile as sf
import torch
from support.paths import REPOSITORY


def fields(kind: type) -> list[str]:
    return [field.name for field in dataclasses.fields(kind)]


def lhotse_recordings() -> bool:
    from lhotse import AudioSource, Recording

    recording = ["id", "sources", "sampling_rate", "num_samples", "duration", "channel_ids", "transforms"]
    return fields(Recording) == recording and fields(AudioSource) == ["type", "channels", "source", "video"]


def lhotse_cuts() -> bool:
    from lhotse import MonoCut, SupervisionSegment

    cut = ["id", "start", "duration", "channel", "supervisions", "features", "recording", "custom"]
    supervision = ["id", "recording_id", "start", "duration", "channel", "text", "language", "speaker", "gender",
                   "custom", "alignment"]  # fmt: skip
    return fields(MonoCut) == cut and fields(SupervisionSegment) == supervision


def lhotse_arrays() -> bool:
    from lhotse.array import Array, TemporalArray

    array = ["storage_type", "storage_path", "storage_key", "shape"]
    return fields(Array) == array and fields(TemporalArray) == ["array", "temporal_dim", "frame_shift", "start"]


def lhotse_dictionaries() -> bool:
    """Objects are made by filling their ``__dict__``, which classes with slots do not have."""
    from lhotse import AudioSource, MonoCut, Recording, SupervisionSegment
    from lhotse.array import Array, TemporalArray

    kinds = (AudioSource, MonoCut, Recording, SupervisionSegment, Array, TemporalArray)
    return all("__dict__" in dir(object.__new__(kind)) for kind in kinds)


def lhotse_headers() -> bool:
    """Recipes read headers by the backend that is set, and recordings with what it returns."""
    from lhotse.audio import backend

    info = inspect.signature(backend.AudioBackend.info).parameters
    found = backend.LibsndfileCompatibleAudioInfo._fields == ("channels", "frames", "samplerate", "duration", "video")
    return found and list(info)[:2] == ["self", "path_or_fd"]


def lhotse_partitions() -> bool:
    from lhotse.recipes.hifitts import prepare_single_partition

    names = ["raw_manifest_path", "corpus_dir", "speaker_id", "clean_or_other"]
    return list(inspect.signature(prepare_single_partition).parameters) == names


def lhotse_filters() -> bool:
    from lhotse import CutSet

    filtered = CutSet(iter(())).filter(len)
    return filtered.data.predicate is len and hasattr(filtered.data, "iterator")


def lhotse_samplers() -> bool:
    from lhotse import CutSet
    from lhotse.dataset import DynamicCutSampler, RoundRobinSampler

    one = DynamicCutSampler(CutSet(iter(())), max_cuts=1)
    return isinstance(one.cuts, tuple) and RoundRobinSampler(one).samplers[0] is one


def lhotse_worker_seeds() -> bool:
    """The seed that was asked for is found again from what a worker's environment has."""
    from lhotse.dataset import dataloading

    with mock.patch.dict(os.environ), mock.patch.object(dataloading, "fix_random_seed"):
        dataloading.worker_init_fn(3, rank=2, world_size=4, seed=5)
        return os.environ[dataloading.LHOTSE_PROCESS_SEED] == str(5 + 100 * 3 + 100_000 * 2)


def lhotse_wrapped_sampler() -> bool:
    from lhotse import CutSet
    from lhotse.dataset import DynamicCutSampler, IterableDatasetWrapper

    sampler = DynamicCutSampler(CutSet(iter(())), max_cuts=1)
    return IterableDatasetWrapper(dataset=None, sampler=sampler).sampler is sampler


class Counting:
    """Three numbers with a state, for a loader."""

    def __init__(self) -> None:
        self.count = 0

    def __iter__(self):
        for self.count in (1, 2, 3):
            yield self.count

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


def torchdata_states() -> bool:
    """The states of a loader's datasets, of one worker process and of none, are where they were."""
    import torch
    from torchdata.stateful_dataloader import StatefulDataLoader

    from sharmill.shar.reading.loading import dataset_states

    class Numbers(Counting, torch.utils.data.IterableDataset):
        pass

    states = []
    for num_workers in (0, 1):
        # Forked, since a class in a function cannot be pickled.
        context = "fork" if num_workers else None
        loader = StatefulDataLoader(
            Numbers(), batch_size=None, num_workers=num_workers, multiprocessing_context=context
        )
        stream = iter(loader)
        assert [next(stream), next(stream)] == [1, 2]
        states.append(dataset_states(loader.state_dict()))
    return states == [[{"count": 2}], [{"count": 2}]]


def nemo_loader_settings() -> bool:
    from nemo.collections.common.data.lhotse.cutset import data_type_parser, get_known_config_data_types
    from nemo.collections.common.data.lhotse.dataloader import LhotseDataLoadingConfig

    known = {field.name for field in dataclasses.fields(LhotseDataLoadingConfig)}
    used = {
        "input_cfg", "multi_config", "shard_seed", "seed", "shuffle", "force_finite", "force_map_dataset",
        "force_iterable_dataset", "metadata_only", "concurrent_bucketing", "sample_rate", "num_workers",
    }  # fmt: skip
    return used <= known and callable(data_type_parser) and "txt" in get_known_config_data_types()


def nemo_broadcasting() -> bool:
    from nemo.collections.common.data.lhotse.broadcasting import BroadcastingDataLoader, is_dp_source_rank

    parameters = list(inspect.signature(BroadcastingDataLoader.__init__).parameters)
    return parameters[:3] == ["self", "source", "device_mesh"] and is_dp_source_rank(None)


def submitit_scripts() -> bool:
    from submitit.slurm.slurm import SlurmExecutor

    text = inspect.signature(SlurmExecutor._make_submission_file_text)
    return list(text.parameters) == ["self", "command", "uid"] and isinstance(
        SlurmExecutor._submitit_command_str, property
    )


def ray_node_addresses() -> bool:
    from ray._private import ray_constants, services

    return hasattr(ray_constants, "ENABLE_RAY_CLUSTER") and callable(services.resolve_ip_for_localhost)


def ray_job_ids() -> bool:
    from ray._private.runtime_env.constants import RAY_JOB_CONFIG_JSON_ENV_VAR
    from ray.dashboard.modules.job.common import JOB_ID_METADATA_KEY

    return (RAY_JOB_CONFIG_JSON_ENV_VAR, JOB_ID_METADATA_KEY) == ("RAY_JOB_CONFIG_JSON_ENV_VAR", "job_submission_id")


def resemblyzer_weights() -> bool:
    import torch

    origin = importlib.util.find_spec("resemblyzer").origin
    state = torch.load(Path(origin).parent / "pretrained.pt", map_location="cpu", weights_only=True)["model_state"]
    return {"lstm.weight_ih_l0", "linear.weight"} <= state.keys()


def nemo_checkpoints() -> bool:
    from sharmill.models.nemo_checkpoint import quiet_nemo

    with quiet_nemo():
        from nemo.core.connectors.save_restore_connector import SaveRestoreConnector
        from nemo.utils import logging

    load = inspect.signature(SaveRestoreConnector.load_instance_with_state_dict)
    return list(load.parameters) == ["self", "instance", "state_dict", "strict"] and hasattr(logging, "temp_verbosity")


def nemo_codec_parts() -> bool:
    from sharmill.models.builtin import BUILTIN_FILE
    from sharmill.models.nemo_checkpoint import quiet_nemo

    with quiet_nemo():
        from nemo.collections.tts.models import AudioCodecModel

        model = AudioCodecModel.restore_from(str(BUILTIN_FILE), map_location="cpu")
    parts = ("audio_encoder", "vector_quantizer", "quantize", "semantic_codec", "samples_per_frame", "num_codebooks")
    return all(hasattr(model, part) for part in parts)


def nemo_codec_layers() -> bool:
    from sharmill.models.builtin import BUILTIN_FILE
    from sharmill.models.cpu_hifigan import fit_hifigan_to_cpu
    from sharmill.models.nemo_checkpoint import quiet_nemo

    with quiet_nemo():
        from nemo.collections.tts.models import AudioCodecModel

        encoder = AudioCodecModel.restore_from(str(BUILTIN_FILE), map_location="cpu").audio_encoder
    return fit_hifigan_to_cpu(encoder) is not encoder


def nemo_speaker_layers() -> bool:
    from sharmill.models.cpu_titanet import fit_titanet_to_cpu
    from sharmill.models.nemo_checkpoint import quiet_nemo

    with quiet_nemo():
        from nemo.collections.asr.modules import ConvASREncoder, SpeakerDecoder
    layer = {"filters": 8, "repeat": 2, "kernel": [3], "stride": [1], "dilation": [1], "dropout": 0.1, "residual": True}
    layer |= {"separable": True, "se": True, "se_context_size": -1}
    encoder = ConvASREncoder(jasper=[layer], activation="relu", feat_in=8)
    model = SimpleNamespace(encoder=encoder, decoder=SpeakerDecoder(8, num_classes=2, pool_mode="attention"))
    pooling = model.decoder._pooling
    fit_titanet_to_cpu(model)
    return model.encoder is not encoder and model.decoder._pooling is not pooling


def miniaudio_flac() -> bool:
    from miniaudio import ffi, lib

    data = BytesIO()
    sf.write(data, np.zeros(100), 16000, format="FLAC")
    flac = lib.ma_dr_flac_open_memory(data.getvalue(), len(data.getvalue()), ffi.NULL)
    samples = np.ones(100, np.int16)
    read = lib.ma_dr_flac_read_pcm_frames_s16(flac, 100, ffi.cast("short *", samples.ctypes.data))
    found = flac.channels, flac.sampleRate, flac.bitsPerSample, read
    lib.ma_dr_flac_close(flac)
    return found == (1, 16000, 16, 100) and not samples.any()


def torch_weight_norm() -> bool:
    import torch

    layer = torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(2, 2))
    return hasattr(layer.parametrizations.weight, "original0") and hasattr(layer.parametrizations.weight, "original1")


def torch_fuser() -> bool:
    import torch

    return hasattr(torch._C, "_jit_set_texpr_fuser_enabled") and hasattr(torch._C, "_jit_texpr_fuser_enabled")


def torch_sizes() -> bool:
    from sharmill.errors import ConfigError
    from sharmill.models.tensors import limited_layers

    with pytest.raises(ConfigError), limited_layers("x", 0):
        torch.nn.Linear(1 << 14, 1 << 14, device="meta")
    return True


# What is relied on: (package, what, the file of sharmill that relies on it, a check that it still is so).
PARTS: list[tuple[str, str, str, Callable[[], bool]]] = [
    ("lhotse", "fields of recordings", "shar/reading/cuts.py", lhotse_recordings),
    ("lhotse", "fields of cuts and supervisions", "shar/reading/cuts.py", lhotse_cuts),
    ("lhotse", "fields of arrays", "shar/reading/cuts.py", lhotse_arrays),
    ("lhotse", "objects with a __dict__", "shar/reading/cuts.py", lhotse_dictionaries),
    ("lhotse", "headers of an audio backend", "collect/recipes.py", lhotse_headers),
    ("lhotse", "a partition of HiFi-TTS", "collect/recipes.py", lhotse_partitions),
    ("lhotse", "predicate and iterator of LazyFilter", "training/nemo/resumable.py", lhotse_filters),
    ("lhotse", "cuts of a sampler, samplers of a RoundRobinSampler", "training/nemo/resumable.py",
     lhotse_samplers),
    ("lhotse", "seeds of worker processes", "training/nemo/partition.py", lhotse_worker_seeds),
    ("lhotse", "sampler of an IterableDatasetWrapper", "training/nemo/loader.py", lhotse_wrapped_sampler),
    ("torchdata", "keys of the state of a StatefulDataLoader", "shar/reading/loading.py", torchdata_states),
    ("nemo_toolkit", "settings and types of its loader", "training/nemo/loader_settings.py", nemo_loader_settings),
    ("nemo_toolkit", "broadcasting of batches", "training/nemo/loader.py", nemo_broadcasting),
    ("submitit", "text of sbatch scripts", "executors/slurm/executor.py", submitit_scripts),
    ("ray", "addresses of nodes", "executors/ray_node.py", ray_node_addresses),
    ("ray", "names of jobs", "files/locks.py", ray_job_ids),
    ("resemblyzer", "weights in pretrained.pt", "models/resemblyzer_encoder.py", resemblyzer_weights),
    ("nemo_toolkit", "loading of checkpoints", "models/nemo_checkpoint.py", nemo_checkpoints),
    ("nemo_toolkit", "parts of AudioCodecModel", "models/nemo_codec.py", nemo_codec_parts),
    ("nemo_toolkit", "layers of the encoders of its codecs", "models/cpu_hifigan.py", nemo_codec_layers),
    ("nemo_toolkit", "layers of ConvASREncoder and of attentive pooling", "models/cpu_titanet.py", nemo_speaker_layers),
    ("miniaudio", "dr_flac", "shar/reading/decoding.py", miniaudio_flac),
    ("torch", "weights of weight_norm", "models/builtin_codec.py", torch_weight_norm),
    ("torch", "switch of the TorchScript fuser", "models/arithmetic.py", torch_fuser),
    ("torch", "sizes of tensors that are made", "models/tensors.py", torch_sizes),
]  # fmt: skip


@pytest.mark.parametrize(("package", "what", "used_in", "holds"), PARTS, ids=[f"{p[0]}: {p[1]}" for p in PARTS])
def test_a_private_part_is_as_it_was(package, what, used_in, holds):
    assert (REPOSITORY / "src" / "sharmill" / used_in).is_file(), f"nothing at {used_in} uses it: remove the line"
    version = importlib.metadata.version(package)
    assert holds(), f"look at {package} {version}: its {what} changed, and src/sharmill/{used_in} relies on them"


@pytest.mark.parametrize("package", sorted({part[0] for part in PARTS}))
def test_a_library_whose_private_parts_are_used_has_an_upper_bound(package):
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    wanted = [
        *project["dependencies"],
        *(line for extra in project["optional-dependencies"].values() for line in extra),
    ]
    bounds = [line for line in wanted if re.match(rf"{package}\b(?!-)", line)]
    assert bounds, f"pyproject.toml does not name {package}"
    assert all("<" in bound for bound in bounds), f"{package} has no upper bound: {bounds}"
