"""Starts the ranks of a training as torchrun does, with a store that listens on one address instead of all.

python jobs/start_ranks.py --nnodes=2 --node-rank=0 --nproc-per-node=8 --rdzv-backend=bound \
    --rdzv-endpoint=ADDRESS:PORT --rdzv-conf=rank=0 SCRIPT [ARGUMENT...]

The options are torchrun's. The backend ``bound`` is its static rendezvous, in which nothing is unpickled, but the first
node binds ADDRESS alone: 127.0.0.1 where there is one node, and then PORT may be 0 for any free one.

On SIGTERM the ranks get it too, and this waits for them as long as they take, where torchrun kills them after 30
seconds: a large checkpoint takes longer, and SLURM has its own limit.
"""

import os
import signal
import socket
import sys
from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path

from torch.distributed import PrefixStore, TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint
from torch.distributed.run import main

_SECONDS_TO_MEET = 600


class BoundRendezvous(StaticTCPRendezvous):
    """The static rendezvous, whose store is bound to the address that the nodes know."""

    def get_backend(self) -> str:
        return "bound"

    def next_rendezvous(self) -> RendezvousInfo:
        """Return what the ranks of this node need to find the others."""
        if self._store is None:
            self._store = self._listen() if self.rank == 0 else TCPStore(
                self.master_addr, self.master_port, self.world_size, is_master=False, timeout=self.timeout
            )  # fmt: skip
        return RendezvousInfo(
            PrefixStore(self.run_id, self._store),
            self.rank,
            self.world_size,
            RendezvousStoreInfo(self.master_addr, self.master_port),
        )

    def _listen(self) -> TCPStore:
        found = socket.getaddrinfo(self.master_addr, self.master_port, type=socket.SOCK_STREAM)
        if self.world_size > 1:
            # A machine may know its own name as 127.0.1.1, and others connect to another address. An address that is
            # given as one is meant: that of nodes which are one machine.
            own = self.master_addr
            found = [one for one in found if one[4][0] == own or not ip_address(one[4][0]).is_loopback]
        if not found:
            raise SystemExit(
                f"Error: --rdzv-endpoint: on this node {self.master_addr} is an address that other nodes cannot reach; "
                "give the address that they have for this node instead of its name"
            )
        family, *_, address = found[0]
        listener = socket.create_server(address[:2], family=family, backlog=2048)
        self.master_port = listener.getsockname()[1]
        # The store closes the descriptor at its end.
        return TCPStore(
            self.master_addr, self.master_port, self.world_size, is_master=True, timeout=self.timeout,
            master_listen_fd=listener.detach(),
        )  # fmt: skip


def make_handler(parameters: RendezvousParameters) -> RendezvousHandler:
    """Return the rendezvous of this node, whose number ``--rdzv-conf`` has as ``rank``."""
    host, port = parse_rendezvous_endpoint(parameters.endpoint, default_port=0)
    return BoundRendezvous(
        host, port, int(parameters.config["rank"]), parameters.max_nodes, parameters.run_id,
        parameters.get_as_int("timeout", _SECONDS_TO_MEET),
    )  # fmt: skip


def hand_on(number: int, frame: object) -> None:
    """Send a signal to the ranks, and go on; before there are any, end by it."""
    lists = Path("/proc/self/task").glob("*/children")
    ranks = [int(pid) for children in lists for pid in children.read_text().split()]
    if not ranks:
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    for pid in ranks:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, hand_on)
    rendezvous_handler_registry.register("bound", make_handler)
    # torch takes the others.
    main(["--signals-to-handle=SIGINT,SIGHUP,SIGQUIT", *sys.argv[1:]])
