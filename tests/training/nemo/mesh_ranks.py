"""One rank of a 2 x 2 mesh (dp x tp) on CPU: reads through a BroadcastingDataLoader and writes down what came."""

from __future__ import annotations

import json
import os
import sys
from functools import partial
from itertools import islice
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh


class Codes(torch.utils.data.Dataset):
    """Ids, and the target codes as one padded tensor."""

    def __getitem__(self, cuts):
        codes = [torch.from_numpy(cut.load_target_codes().T.copy()) for cut in cuts]
        return {"ids": [cut.id for cut in cuts], "codes": torch.nn.utils.rnn.pad_sequence(codes, batch_first=True)}


def main(rank: int, folder: Path) -> None:
    os.environ.pop("RANK", None)
    store = dist.FileStore(str(folder / "store"), 4)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=4)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    from sharmill.training import get_dataloader, merge_data_states

    # The same four processes, of which two share their data for context parallelism.
    context = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    found = {}
    dp_rank = mesh["dp"].get_local_rank()
    for name, settings in json.loads((folder / "settings.json").read_text()).items():
        resumable = "canonical" in settings or name.startswith("resumable")
        axes = context if name.endswith("cp") else mesh
        make = partial(get_dataloader, settings, dp_rank, 2, dataset=Codes(), device_mesh=axes, resumable=resumable)
        loader = make()
        limit = None if settings.get("force_finite") else 6
        found[name] = [
            {"ids": batch["ids"], "shape": list(batch["codes"].shape), "sum": int(batch["codes"].sum())}
            for batch in islice(iter(loader), limit)
        ]
        if resumable:
            states: list = [None] * 4
            dist.all_gather_object(states, loader.state_dict())
            resumed = make(state=merge_data_states(states))
            found[f"{name}, resumed"] = [batch["ids"] for batch in islice(iter(resumed), 4)]
        # A source that is left in the middle of its data sends nothing more, so nobody waits for it.
        dist.barrier()
    found["coordinates"] = mesh.get_coordinate()
    (folder / f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
