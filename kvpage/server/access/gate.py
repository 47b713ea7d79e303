"""Gate: the way into the application: the host's name, the key, the size of the body.

It is plain ASGI, in front of all routes, also of mounted applications. A body is counted as it comes: one of 1 GiB
is refused at its first bytes beyond the limit, and nothing of it is kept.
"""

import ipaddress
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from starlette.datastructures import Headers
from starlette.responses import Response

from kvpage.server.access.keys import Keys
from kvpage.server.config import ServerConfig
from kvpage.server.protocol.errors import ApiError

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

PROBES = frozenset({"/health", "/ping"})  # they tell nothing: probes may ask by any name
METRICS = "/metrics"
OPEN_PATHS = PROBES | {"/", "/favicon.ico", "/version"}
OPEN_FOLDERS = ("/page/",)
"""The page's own files. All that it shows comes from paths that need a key."""


class Gate:
    """An ASGI application in front of another one.

    The caller is left in the scope, under "caller".
    """

    def __init__(self, app: App, config: ServerConfig) -> None:
        self._app = app
        self._keys = Keys(config.api_keys)
        self._hosts = frozenset(host.lower() for host in config.allowed_hosts)
        self._max_bytes = config.max_body_bytes
        self._open_paths = OPEN_PATHS | ({METRICS} if config.open_metrics else set())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a connection."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            self._check(scope)
        except ApiError as error:
            await error_response(error, scope["path"], closes=True)(scope, receive, send)
            return
        await self._app(scope, self._limited(receive), send)

    def _check(self, scope: Scope) -> None:
        headers = Headers(scope=scope)
        path = scope["path"]
        self._check_host(headers.getlist("host"), path)
        if path not in self._open_paths and not path.startswith(OPEN_FOLDERS):
            scope["caller"] = self._keys.caller(headers)
        length = headers.get("content-length", "0")
        if length.isdigit() and int(length) > self._max_bytes:
            raise self._too_large()

    def _check_host(self, hosts: list[str], path: str) -> None:
        """Refuse other names. An address is none: a web page reaches a server by it only where it is the server's."""
        if len(hosts) > 1:
            raise ApiError(400, f"the header Host must come once, got {len(hosts)}", code="invalid_host")
        name = host_name(hosts[0] if hosts else "")
        if self._hosts and path not in PROBES and name not in self._hosts and not is_address(name):
            raise ApiError(403, "the host in the URL is none that this server answers to", code="host_not_allowed")

    def _limited(self, receive: Receive) -> Receive:
        num_bytes = 0

        async def limited() -> Message:
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes > self._max_bytes:
                raise self._too_large()
            return message

        return limited

    def _too_large(self) -> ApiError:
        message = f"body must be at most {self._max_bytes} bytes"
        return ApiError(413, message, code="body_too_large", headers={"connection": "close"})


def host_name(host: str) -> str:
    """Return the name in a Host header, without the port."""
    name = host[: host.find("]") + 1] if host.startswith("[") else host.partition(":")[0]
    return name.lower()


def is_address(name: str) -> bool:
    """Return whether the name in a Host header is an IP address."""
    try:
        ipaddress.ip_address(name[1:-1] if name.startswith("[") else name)
    except ValueError:
        return False
    return True


def error_response(error: ApiError, path: str, closes: bool = False) -> Response:
    """Return the answer that an error is, for a path. closes: whether the connection ends, as its body was not read."""
    headers = error.headers | ({"connection": "close"} if closes else {})
    return Response(error.body_for(path), error.status, headers, media_type="application/json")
