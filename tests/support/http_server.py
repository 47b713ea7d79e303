"""A server of tests on a port of this machine: uvicorn in a thread."""

import contextlib
import socket
import threading
from collections.abc import Iterator
from typing import Any

import uvicorn
from support.server_app import Server, running_server

from kvpage.server import ServerConfig
from kvpage.serving import AsyncEngine, AsyncEngineConfig


@contextlib.contextmanager
def serving(app: Any, live: AsyncEngine, port: int = 0) -> Iterator[str]:
    """Yield the address of an application; close its engine, its thread and its sockets afterwards."""
    with socket.create_server(("127.0.0.1", port), backlog=512) as door:
        settings = uvicorn.Config(app, log_level="error", log_config=None, lifespan="off", timeout_graceful_shutdown=5)
        runs = uvicorn.Server(settings)
        thread = threading.Thread(target=runs.run, args=([door],), name="uvicorn")
        thread.start()
        try:
            yield f"http://127.0.0.1:{door.getsockname()[1]}"
        finally:
            live.close()  # ends the feeds of watchers, for which uvicorn would wait
            runs.should_exit = True
            thread.join(120)
            assert not thread.is_alive(), "the server does not end"


@contextlib.contextmanager
def listening_server(
    config: ServerConfig | None = None, limits: AsyncEngineConfig | None = None, port: int = 0, **fields: Any
) -> Iterator[tuple[str, Server]]:
    """Yield the address and the parts of a server over the tiny engine."""
    with running_server(config, limits, **fields) as server, serving(server.app, server.live, port) as url:
        yield url, server
