"""Tests of NeMo's BroadcastingDataLoader with sharmill's datasets on four processes."""

import json
import os
from collections import Counter
from functools import partial
from itertools import islice

import pytest
import torch
import torch.distributed as dist
from support.example import run_ranks
from torch.distributed.device_mesh import init_device_mesh

from sharmill.training import get_dataloader, merge_data_states

pytestmark = pytest.mark.slow


class Codes(torch.utils.data.Dataset):
    """A dataset of ids, and target codes as one padded tensor."""

    def __getitem__(self, cuts):
        codes = [torch.from_numpy(cut.load_target_codes().T.copy()) for cut in cuts]
        return {"ids": [cut.id for cut in cuts], "codes": torch.nn.utils.rnn.pad_sequence(codes, batch_first=True)}


def read_on_mesh(folder):
    """Read as one rank of a 2 x 2 mesh (dp x tp) through a BroadcastingDataLoader, and record the batches."""
    dist.init_process_group("gloo")
    # The loader learns the ranks only from its arguments.
    rank = os.environ.pop("RANK")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    # The same four processes with context parallelism, so that two of them share their data.
    context = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    found = {"coordinates": mesh.get_coordinate()}
    for name, settings in json.loads((folder / "settings.json").read_text()).items():
        resumable = name.startswith("resumable")
        axes = context if name.endswith("cp") else mesh
        dp_rank = mesh["dp"].get_local_rank()
        make = partial(get_dataloader, settings, dp_rank, 2, dataset=Codes(), device_mesh=axes, resumable=resumable)
        loader = make()
        limit = None if settings.get("force_finite") else 6
        found[name] = [
            {"ids": batch["ids"], "shape": list(batch["codes"].shape), "sum": int(batch["codes"].sum())}
            for batch in islice(iter(loader), limit)
        ]
        if resumable:
            states = [None] * 4
            dist.all_gather_object(states, loader.state_dict())
            resumed = make(state=merge_data_states(states))
            found[f"{name}, resumed"] = [batch["ids"] for batch in islice(iter(resumed), 4)]
        # A source that is abandoned early sends no further batches, so no rank may wait for it.
        dist.barrier()
    (folder / f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def found(corpora, tmp_path_factory):
    """The batches of the four ranks by their coordinates (dp, tp)."""
    folder = tmp_path_factory.mktemp("mesh")
    random = {"shuffle": True, "shuffle_buffer_size": 20, "num_workers": 1}
    settings = {
        "once": {"force_finite": True, "seed": 1},
        "randomized": {"shard_seed": "randomized", "seed": 1},
        "trng": {"shard_seed": "trng"},
        "resumable": {"shard_seed": "randomized", "seed": 1, "num_workers": 0, "shuffle_buffer_size": 1},
        "resumable, cp": {"shard_seed": "randomized", "seed": 1, "num_workers": 0, "shuffle_buffer_size": 1},
    }
    shared = {"input_cfg": [corpora.entry("large")], "batch_size": 3}
    (folder / "settings.json").write_text(json.dumps({name: shared | random | own for name, own in settings.items()}))
    run_ranks(read_on_mesh, 4, folder)
    results = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(4)]
    return {tuple(result.pop("coordinates")): result for result in results}


@pytest.mark.parametrize("name", ["once", "randomized", "trng", "resumable", "resumable, cp"])
def test_tensor_parallel_ranks_see_equal_batches(found, name):
    for dp in (0, 1):
        assert found[dp, 0][name] == found[dp, 1][name]
        assert found[dp, 0][name][0]["shape"][2] == 3
        assert found[dp, 0][name][0]["sum"] > 0


@pytest.mark.parametrize("name", ["resumable", "resumable, cp"])
def test_ranks_of_a_mesh_go_on_where_they_were(found, name):
    """12 batches of three are 36 cuts. Of 24 cuts, one is filtered out, and none comes twice in an epoch."""
    resumed = f"{name}, resumed"
    for dp in (0, 1):
        assert found[dp, 0][resumed] == found[dp, 1][resumed]
    before = [[one for batch in found[dp, 0][name] for one in batch["ids"]] for dp in (0, 1)]
    after = [[one for batch in found[dp, 0][resumed] for one in batch] for dp in (0, 1)]
    # Each rank has 11 or 12 cuts per epoch.
    counts = Counter(before[0] + before[1] + after[0] + after[1])
    assert len(counts) == 23
    assert max(counts.values()) - min(counts.values()) <= 1
