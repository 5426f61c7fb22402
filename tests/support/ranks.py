"""Ranks as processes that are forked from a server, which has imported NeMo once for all of them."""

from __future__ import annotations

import multiprocessing
import os
import socket
from collections.abc import Callable
from typing import Any

_PRELOADED = [
    "nemo.collections.asr", "nemo.collections.tts", "nemo.collections.common.data.lhotse.dataloader",
    "torch.distributed.checkpoint.state_dict", "torch.distributed.fsdp", "torch.distributed.tensor.parallel",
]  # fmt: skip
LIMIT_SECONDS = 500


def run_ranks(target: Callable[..., None], world_size: int, *arguments: Any) -> None:
    """Run ``target(*arguments)`` in ranks with the environment that torchrun gives them; all must end well."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = [
        context.Process(target=_run_rank, args=(rank, world_size, port, target, arguments))
        for rank in range(world_size)
    ]
    for rank in ranks:
        rank.start()
    try:
        for rank in ranks:
            rank.join(timeout=LIMIT_SECONDS)
        assert [rank.exitcode for rank in ranks] == [0] * world_size
    finally:
        for rank in ranks:
            rank.kill()


def _run_rank(rank: int, world_size: int, port: int, target: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    import torch

    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "NODE_RANK": "0", "WORLD_SIZE": str(world_size)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    # As under torchrun: NeMo's parsers make functions that cannot be pickled.
    multiprocessing.set_start_method("fork", force=True)
    target(*arguments)
