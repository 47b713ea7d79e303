"""The part of Ray Serve that the application uses, as modules that tests put in its place.

fake_ray.installed(monkeypatch)      import ray.serve.config, ...
"""

import sys
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any


class RayError(Exception):
    """As ray.exceptions.RayError."""


class RayServeException(Exception):
    """As ray.serve.exceptions.RayServeException."""


@dataclass
class RequestRouterConfig:
    request_router_class: str = "pow_2"
    request_router_kwargs: dict[str, Any] = field(default_factory=dict)
    request_routing_stats_period_s: float = 10.0


@dataclass
class Deployment:
    """As serve.deployment returns it. bound: the arguments of `bind`, once it was called."""

    target: Any
    options: dict[str, Any]
    bound: tuple[Any, ...] | None = None

    def bind(self, *args: Any) -> "Deployment":
        return Deployment(self.target, self.options, args)


def installed(monkeypatch: Any) -> None:
    """Put the fakes where `import ray.serve` finds them, until the test ends."""
    ray, serve = types.ModuleType("ray"), types.ModuleType("ray.serve")
    config, exceptions = types.ModuleType("ray.serve.config"), types.ModuleType("ray.exceptions")
    errors = types.ModuleType("ray.serve.exceptions")
    config.RequestRouterConfig, exceptions.RayError = RequestRouterConfig, RayError  # type: ignore[attr-defined]
    errors.RayServeException = RayServeException  # type: ignore[attr-defined]
    replica = types.SimpleNamespace(replica_id=types.SimpleNamespace(unique_id="r1"))
    vars(serve).update(
        config=config,
        exceptions=errors,
        deployment=lambda target, **options: Deployment(target, options),
        ingress=lambda: lambda target: target,
        get_replica_context=lambda: replica,
    )
    vars(ray).update(serve=serve, exceptions=exceptions)
    for module in (ray, serve, config, exceptions, errors):
        monkeypatch.setitem(sys.modules, module.__name__, module)


class Response:
    """The answer of a replica to one streaming call. is_cancelled: whether its reader has left it."""

    def __init__(self, stream: Any) -> None:
        self._stream, self.is_cancelled = stream, False

    def __aiter__(self) -> Any:
        return self._stream

    def cancel(self) -> None:
        self.is_cancelled = True


class Handle:
    """A handle of a deployment whose replicas are objects here, which take calls in turn.

    wrap: makes the stream that the reader gets of the replica's own; it may raise as Ray would.
    """

    def __init__(self, replicas: Sequence[Any], wrap: Callable[[Any], Any] = lambda stream: stream) -> None:
        self.replicas, self.wrap = list(replicas), wrap
        self.calls: list[Any] = []
        self.responses: list[Response] = []

    def options(self, *, stream: bool, method_name: str) -> "Handle":
        assert stream and method_name == "generate"
        return self

    def remote(self, call: Any) -> Response:
        replica = self.replicas[len(self.calls) % len(self.replicas)]
        self.calls.append(call)
        self.responses.append(Response(self.wrap(replica.generate(call))))
        return self.responses[-1]

    def broadcast(self, method: str) -> Any:
        async def results_async(timeout_s: float, return_exceptions: bool) -> list[Any]:
            return [RayError("gone"), *[await getattr(one, method)() for one in self.replicas]]

        return types.SimpleNamespace(results_async=results_async)
