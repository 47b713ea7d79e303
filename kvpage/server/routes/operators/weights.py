"""/weights: the version of the model's weights, which operators may change to another of a folder.

POST {"version": "step-200", "running": "finish"} ─► FOLDER/step-200/*.safetensors ─► AsyncEngine.update_weights
"""

import asyncio
import hmac
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from kvpage.server.answers.responses import unless_gone
from kvpage.server.protocol.errors import REFUSED, ApiError, as_api_error, bad_request
from kvpage.server.protocol.request_model import RequestModel, read_model
from kvpage.server.routes.bodies import answer, ignored_fields, read_body
from kvpage.server.service import Service
from kvpage.serving.assembly.weight_updates import Running

router = APIRouter()
FORBIDDEN = "the header X-Operator-Key must be the operators' key"


class WeightsRequest(RequestModel):
    """Another version of the weights.

    Attributes:
        version: The name of a folder within the server's folder of weights.
        running: What becomes of requests that have begun; see Engine.update_weights.
        drop_last: Forget the blocks of the version before, once they are not in use.
    """

    version: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")]
    running: Running = "restart"
    drop_last: bool = False


@router.get("/weights")
async def weights(request: Request) -> Response:
    """Tell the version, and the counts of updates."""
    service = Service.of(request)
    _check_operator(service, request)
    return answer(_card(service))


@router.post("/weights")
async def update(request: Request) -> Response:
    """Change to another version. The answer comes once it has begun; a client that goes before withdraws it."""
    service = Service.of(request)
    folder = _check_operator(service, request)
    with service.open_request() as open_request:
        ignored = ignored_fields(request)
        body = await read_body(
            request, lambda fields: read_model(WeightsRequest, fields, ignored=ignored), open_request
        )
        await unless_gone(request, _update(service, folder / body.version, body))
    return answer(_card(service))


async def _update(service: Service, folder: Path, body: WeightsRequest) -> None:
    core: Any = service.engine.engine
    last: list[str] = []

    def change() -> None:
        last.append(core.weights_version)  # here: others may have changed it since this request came
        write()

    try:
        write = await asyncio.to_thread(core.read_weights, folder)
        await service.engine.update_weights(body.version, change, running=body.running)
        if body.drop_last:
            await asyncio.wrap_future(service.engine.call(lambda engine: _drop(engine, last[0])))
    except REFUSED as error:
        raise as_api_error(error) from error
    except OSError as error:
        raise bad_request(f"weights of version {body.version!r} cannot be read", param="version") from error
    except RuntimeError as error:
        raise ApiError(409, str(error)) from error


def _drop(engine: Any, version: str) -> None:
    """Drop a version, unless others have gone back to it meanwhile."""
    if version != engine.weights_version:
        engine.drop_version(version)


def _check_operator(service: Service, request: Request) -> Path:
    """Return the folder of weights. ApiError 404 without one, 403 for others than operators."""
    folder, key = service.config.weights_folder, service.config.operator_key
    if folder is None:
        raise ApiError(404, "the path '/weights' does not exist")
    if not hmac.compare_digest(request.headers.get("x-operator-key", "").encode(), key.encode()):
        raise ApiError(403, FORBIDDEN, code="operator_key")
    return folder


def _card(service: Service) -> dict[str, Any]:
    stats = service.engine.stats().engine.weights
    return {
        "object": "weights",
        "version": stats.version,
        "adapters": list(stats.adapters),
        "num_updates": stats.num_updates,
        "num_noticed": stats.num_noticed,
        "num_restarted": stats.num_restarted,
        "num_stale": stats.num_stale,
    }
