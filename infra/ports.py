"""Free ports of the loopback address."""

import secrets
import socket


def is_port_free(port: int) -> bool:
    """Whether a server may listen on this loopback port now."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def free_ports(num_ports: int) -> list[int]:
    """Different free loopback ports, below the range that systems lend to outgoing connections."""
    ports: list[int] = []
    while len(ports) < num_ports:
        port = 15_000 + secrets.randbelow(15_000)
        if port not in ports and is_port_free(port):
            ports.append(port)
    return ports
