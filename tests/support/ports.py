"""free_port: a port for a server that cannot choose one by itself."""

import random
import socket

FIRST, LAST = 15_000, 32_000  # below the ports that systems give to connections: none of these takes it meanwhile
_draw = random.SystemRandom()  # test processes beside each other draw others


def free_port() -> int:
    """Return a port of this machine on which nobody listens now."""
    while True:
        port = _draw.randint(FIRST, LAST)
        with socket.socket() as tried:
            try:
                tried.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port
