"""/v1/models: the names of the model."""

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from kvpage.server.routes.bodies import answer
from kvpage.server.service import Service

router = APIRouter()


@router.get("/v1/models")
async def models(request: Request) -> Response:
    """List the names of the model."""
    service = Service.of(request)
    return answer({"object": "list", "data": [_card(service, name) for name in service.config.served_model_names]})


@router.get("/v1/models/{name:path}")
async def model(request: Request, name: str) -> Response:
    """Describe one of them."""
    service = Service.of(request)
    return answer(_card(service, service.check_model(name)))


def _card(service: Service, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": service.created,
        "owned_by": "kvpage",
        "root": service.config.served_model_names[0],
        "parent": None,
        "max_model_len": service.engine.engine.max_model_len,
    }
