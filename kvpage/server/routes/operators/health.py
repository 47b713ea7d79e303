"""/health, /ping, /version and /metrics: for operators and probes."""

import asyncio
from importlib.metadata import version as installed_version

from fastapi import APIRouter
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from starlette.requests import Request
from starlette.responses import Response

from kvpage.server.metrics.http_collector import HttpCollector
from kvpage.server.metrics.vllm_collector import VllmCollector
from kvpage.server.protocol.errors import ApiError
from kvpage.server.routes.bodies import answer
from kvpage.server.service import Service
from kvpage.serving.stats.prometheus import EngineCollector

router = APIRouter()


@router.get("/health")
async def health(request: Request) -> Response:
    """Return 200 while requests are taken, else 503."""
    return _health(Service.of(request))


@router.api_route("/ping", methods=["GET", "POST"])
async def ping(request: Request) -> Response:
    """Do the same."""
    return _health(Service.of(request))


def _health(service: Service) -> Response:
    if service.is_healthy:
        return Response(status_code=200)
    failure = service.engine.failure
    reason = "it is closing" if failure is None else f"its thread has failed: {type(failure).__name__}: {failure}"
    raise ApiError(503, f"the server takes no requests: {reason}", code="not_healthy")


@router.get("/version")
async def version() -> Response:
    """Return kvpage's version."""
    return answer({"version": installed_version("kvpage")})


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    """Return all numbers, for Prometheus."""
    registry: CollectorRegistry = request.app.state.registry
    text = await asyncio.to_thread(generate_latest, registry)
    return Response(text, headers={"content-type": CONTENT_TYPE_LATEST})


def make_registry(service: Service) -> CollectorRegistry:
    """Return a registry with metrics of kvpage, of HTTP, and under vLLM's names."""
    registry, name = CollectorRegistry(), service.config.served_model_names[0]
    registry.register(EngineCollector(service.engine.engine, {"model_name": name}))
    registry.register(HttpCollector(service.http, service.runner.work.hints, name))
    registry.register(VllmCollector(service.engine, service.latencies, name))
    return registry
