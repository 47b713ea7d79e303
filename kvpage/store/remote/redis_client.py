"""Clients of redis-py for each kind of URL, whose connections send and receive values without copying them.

redis-py copies the values that it is given, with hiredis twice. That halves the speed of a SET of 32 MiB, and nearly
that of a GET.
"""

import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any
from urllib.parse import SplitResult, unquote

try:
    import redis
    from redis.backoff import NoBackoff
    from redis.cluster import ClusterNode, RedisCluster
    from redis.retry import Retry
    from redis.sentinel import Sentinel, SentinelManagedConnection, SentinelManagedSSLConnection
except ImportError as error:
    raise ImportError("redis needs the package redis: pip install 'kvpage[redis]'") from error

from kvpage.store.remote.redis_parser import BulkParser

__all__ = ["Client", "connector", "disconnect", "interrupt", "pack_commands", "redis"]

Client = Any  # redis.Redis or RedisCluster
SCHEMES = tuple(f"{name}{kind}" for name in ("redis", "rediss") for kind in ("", "+cluster", "+sentinel")) + ("unix",)
TLS_OPTIONS = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile", "ssl_cert_reqs", "ssl_check_hostname")
CONNECT_SECONDS, SOCKET_SECONDS = 5.0, 30.0  # of abandoned threads: a call's own deadline is the tier's


def pack_commands(commands: Sequence[Sequence[Any]]) -> list[bytes | memoryview]:
    """Return commands in the protocol's form, as buffers to send in turn; memoryviews are not copied."""
    buffers: list[bytes | memoryview] = []
    text = bytearray()
    for command in commands:
        text += b"*%d\r\n" % len(command)
        for argument in command:
            if isinstance(argument, memoryview):
                buffers += [bytes(text + b"$%d\r\n" % argument.nbytes), argument]
                text = bytearray(b"\r\n")
            else:
                data = argument if isinstance(argument, bytes) else str(argument).encode()
                text += b"$%d\r\n%b\r\n" % (len(data), data)
    return [*buffers, bytes(text)]


class _Direct:
    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings, parser_class=BulkParser)  # type: ignore[call-arg]

    def pack_commands(self, commands: Sequence[Sequence[Any]]) -> list[bytes | memoryview]:
        return pack_commands(commands)


class _Connection(_Direct, redis.Connection):
    pass


class _SSLConnection(_Direct, redis.SSLConnection):
    pass


class _UnixConnection(_Direct, redis.UnixDomainSocketConnection):
    pass


class _SentinelConnection(_Direct, SentinelManagedConnection):
    pass


class _SentinelSSLConnection(_Direct, SentinelManagedSSLConnection):
    pass


def connector(url: SplitResult, options: Mapping[str, str]) -> Callable[[], Client]:
    """Return a maker of clients for a URL. A cluster's client connects at once, others when they are used.

    options: of TLS. Raises ValueError for another URL.
    """
    name, _, kind = url.scheme.partition("+")
    if url.scheme not in SCHEMES:
        raise ValueError(f"scheme must be one of {', '.join(SCHEMES)}, got {url.scheme!r}")
    if unknown := sorted(set(options) - set(TLS_OPTIONS if name == "rediss" else ())):
        raise ValueError(f"options must be known, got {', '.join(unknown)}")
    settings: dict[str, Any] = {
        "socket_timeout": SOCKET_SECONDS,
        "socket_connect_timeout": CONNECT_SECONDS,
        "protocol": 2,
        **{option: _tls_value(option, text) for option, text in options.items()},
        **{part: unquote(text) for part, text in (("username", url.username), ("password", url.password)) if text},
    }
    make = {"": _unix if name == "unix" else _single, "cluster": _cluster, "sentinel": _sentinel}[kind]
    return make(url, name == "rediss", settings)


def disconnect(client: Client) -> None:
    """Close all connections. Only the thread that uses them may call it, or any if none does."""
    for pool in _pools(client):
        pool.disconnect(inuse_connections=True)


def interrupt(client: Client) -> None:
    """Make the thread that waits for a connection fail at once; it has to disconnect.

    Nothing is closed here: the descriptor's number would be the next socket's, and the thread may be about to wait for
    that number.
    """
    for pool in _pools(client):
        for connection in list(pool._in_use_connections):
            sock = connection._sock
            if sock is not None:
                _shut_down(sock)


def _shut_down(sock: socket.socket) -> None:
    with suppress(OSError):  # not connected any more
        socket.socket.shutdown(sock, socket.SHUT_RDWR)  # a TLS socket's own would forget its keys, under the reader


def _pools(client: Client) -> list[Any]:
    nodes = [client]
    if isinstance(client, RedisCluster):
        cluster: Any = client  # the class has no types
        nodes = cluster.get_nodes()
    owners = [node.redis_connection if isinstance(node, ClusterNode) else node for node in nodes]
    return [owner.connection_pool for owner in owners if owner is not None]


def _single(url: SplitResult, is_tls: bool, settings: dict[str, Any]) -> Callable[[], Client]:
    [(host, port)] = _hosts(url, 6379, most=1)
    settings |= {"host": host, "port": port, "db": _database(url.path.strip("/"))}
    settings |= {"connection_class": _SSLConnection if is_tls else _Connection, "retry": _no_retry()}
    return lambda: redis.Redis(connection_pool=redis.ConnectionPool(**settings))


def _unix(url: SplitResult, is_tls: bool, settings: dict[str, Any]) -> Callable[[], Client]:
    settings |= {"path": unquote(url.path), "connection_class": _UnixConnection, "retry": _no_retry()}
    return lambda: redis.Redis(connection_pool=redis.ConnectionPool(**settings))


def _cluster(url: SplitResult, is_tls: bool, settings: dict[str, Any]) -> Callable[[], Client]:
    hosts = _hosts(url, 6379)
    if _database(url.path.strip("/")):
        raise ValueError(f"a cluster must have database 0, got {url.path.strip('/')}")
    settings["connection_class"] = _SSLConnection if is_tls else _Connection

    def connect() -> Client:
        first = f"redis://{hosts[0][0]}:{hosts[0][1]}"  # by URL: only so does the client take a class of connections
        node: Any = ClusterNode  # the class has no types
        more = [node(*host) for host in hosts[1:]]
        retry = Retry(NoBackoff(), 2)  # where a slot has moved
        return RedisCluster(url=first, startup_nodes=more, retry=retry, require_full_coverage=False, **settings)

    return connect


def _sentinel(url: SplitResult, is_tls: bool, settings: dict[str, Any]) -> Callable[[], Client]:
    hosts = _hosts(url, 26379)
    service, _, database = url.path.strip("/").partition("/")
    if not service:
        raise ValueError(f"the name of the master must follow the sentinels, got {url.path!r}")
    settings |= {"db": _database(database), "retry": _no_retry()}
    sentinel_settings = {
        "socket_timeout": CONNECT_SECONDS,
        "socket_connect_timeout": CONNECT_SECONDS,
        "retry": _no_retry(),
    }
    of_class = _SentinelSSLConnection if is_tls else _SentinelConnection

    def connect() -> Client:
        new: Any = Sentinel  # the class has no types
        sentinels = new(hosts, sentinel_kwargs=sentinel_settings, **settings)
        return sentinels.master_for(unquote(service), connection_class=of_class)

    return connect


def _no_retry() -> Retry:
    return Retry(NoBackoff(), 0)


def _hosts(url: SplitResult, default_port: int, most: int | None = None) -> list[tuple[str, int]]:
    """Return the hosts of host:port,host:port after user:password@; IPv6 addresses are in brackets."""
    hosts = []
    for text in url.netloc.rpartition("@")[2].split(","):
        host, port = SplitResult("", text, "", "", ""), default_port
        if not host.hostname:
            raise ValueError(f"a host must have a name, got {text!r}")
        hosts.append((host.hostname, host.port or port))
    if most and len(hosts) > most:
        raise ValueError(f"one host must be named, got {len(hosts)}: a cluster is redis+cluster://")
    return hosts


def _database(text: str) -> int:
    if not text.isdigit() and text:
        raise ValueError(f"database must be an integer, got {text!r}")
    return int(text or 0)


def _tls_value(option: str, text: str) -> Any:
    if option != "ssl_check_hostname":
        return text
    if text not in ("true", "false"):
        raise ValueError(f"{option} must be true or false, got {text!r}")
    return text == "true"
