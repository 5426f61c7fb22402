"""A process that holds a folder's lock; run as ``python -m support.lock_holder FOLDER LEASE_SECONDS HOST TURNS``.

HOST is ``here``, or any other name: then the process does as if it ran under another kernel. With no TURNS it prints
``inside`` and leaves at the end of its input; otherwise it enters so often, and fails if anybody else is inside.
"""

import select
import socket
import sys
from pathlib import Path

from sharmill.errors import SharmillError
from sharmill.files import host as this_host, locks


def take_turns(folder: Path, lease_seconds: float, turns: int) -> None:
    occupied, counter = folder / "occupied", folder / "counter"
    for _ in range(turns):
        with locks.FolderLock(folder, wait_seconds=60, lease_seconds=lease_seconds):
            occupied.touch(exist_ok=False)
            counter.write_text(str(int(counter.read_text()) + 1))
            occupied.unlink()


def main() -> None:
    folder, lease_seconds, host, turns = Path(sys.argv[1]), float(sys.argv[2]), sys.argv[3], int(sys.argv[4])
    if host != "here":
        this_host.this_kernel = lambda: host
        socket.gethostname = lambda: host
    locks._POLL_SECONDS = 0.002 if turns else 0.05
    try:
        if turns:
            take_turns(folder, lease_seconds, turns)
            return
        with locks.FolderLock(folder, lease_seconds=lease_seconds):
            print("inside", flush=True)
            # A signal that comes right before a read does not end it: Python's handlers run between instructions.
            while not select.select([sys.stdin], [], [], 0.1)[0]:
                pass
    except SharmillError as error:
        print(error.code, error, flush=True)
        sys.exit(1)


main()
