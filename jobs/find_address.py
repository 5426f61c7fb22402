"""Print the address by which another machine reaches this one: python jobs/find_address.py OTHER.

The machine's own name is not enough, because /etc/hosts may map it to 127.0.1.1 or to a private network.
"""

import socket
import sys


def find_address(other: str) -> str:
    """Return the address from which this machine sends packets to another machine."""
    family, *_, address = socket.getaddrinfo(other, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        # Connecting a datagram socket sends nothing; it only selects a route.
        probe.connect(address)
        return str(probe.getsockname()[0])


if __name__ == "__main__":
    print(find_address(sys.argv[1]))
