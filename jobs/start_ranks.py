"""Start the ranks of a training as torchrun does, with a store that listens on one address only.

python jobs/start_ranks.py --nnodes=2 --node-rank=0 --nproc-per-node=8 --rdzv-backend=bound \
    --rdzv-endpoint=ADDRESS:PORT --rdzv-conf=rank=0 SCRIPT [ARGUMENT...]

The options are torchrun's. The backend ``bound`` is torchrun's static rendezvous, which unpickles nothing, with one
change: the first node listens only on ADDRESS. With a single node, use 127.0.0.1; PORT 0 then selects a free port.

SIGTERM is forwarded to the ranks, and this process waits for them without a time limit. torchrun would kill them after
30 seconds, but saving a large checkpoint takes longer, and SLURM has its own limit.
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

_RENDEZVOUS_SECONDS = 600


class BoundRendezvous(StaticTCPRendezvous):
    """Static rendezvous whose store listens only on the address that the nodes know."""

    def get_backend(self) -> str:
        return "bound"

    def next_rendezvous(self) -> RendezvousInfo:
        """Return the information that the ranks of this node need to find the other ranks."""
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
            # A machine's own name may resolve to 127.0.1.1, which other machines cannot reach. A loopback address is
            # allowed only if the endpoint is this address itself, because all nodes are then one machine.
            own = self.master_addr
            found = [one for one in found if one[4][0] == own or not ip_address(one[4][0]).is_loopback]
        if not found:
            raise SystemExit(
                f"Error: --rdzv-endpoint: on this node, {self.master_addr} is an address that others cannot reach; "
                "use this node's address in their network instead of its name"
            )
        family, *_, address = found[0]
        listener = socket.create_server(address[:2], family=family, backlog=2048)
        self.master_port = listener.getsockname()[1]
        # The store closes the descriptor when it ends.
        return TCPStore(
            self.master_addr, self.master_port, self.world_size, is_master=True, timeout=self.timeout,
            master_listen_fd=listener.detach(),
        )  # fmt: skip


def make_handler(parameters: RendezvousParameters) -> RendezvousHandler:
    """Return the rendezvous of this node, whose number is ``rank`` in ``--rdzv-conf``."""
    host, port = parse_rendezvous_endpoint(parameters.endpoint, default_port=0)
    return BoundRendezvous(
        host, port, int(parameters.config["rank"]), parameters.max_nodes, parameters.run_id,
        parameters.get_as_int("timeout", _RENDEZVOUS_SECONDS),
    )  # fmt: skip


def forward_signal(number: int, frame: object) -> None:
    """Send a signal to the ranks; if no ranks exist yet, let the signal end this process."""
    lists = Path("/proc/self/task").glob("*/children")
    ranks = [int(pid) for children in lists for pid in children.read_text().split()]
    if not ranks:
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    for pid in ranks:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, forward_signal)
    rendezvous_handler_registry.register("bound", make_handler)
    # torch still handles the other signals.
    main(["--signals-to-handle=SIGINT,SIGHUP,SIGQUIT", *sys.argv[1:]])
