"""Prints the address of this machine that another one reaches it by: python jobs/find_address.py OTHER.

A machine's own name does not tell: /etc/hosts may have 127.0.1.1 for it, or an address in a network of its own.
"""

import socket
import sys


def find_address(other: str) -> str:
    """Return the address that packets to another machine are sent from."""
    family, *_, address = socket.getaddrinfo(other, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        # Sends nothing: the system looks at its routes.
        probe.connect(address)
        return str(probe.getsockname()[0])


if __name__ == "__main__":
    print(find_address(sys.argv[1]))
