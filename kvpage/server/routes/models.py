"""/v1/models: the names of the model, and of its adapters."""

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from kvpage.server.routes.bodies import answer
from kvpage.server.service import Service

router = APIRouter()


@router.get("/v1/models")
async def models(request: Request) -> Response:
    """List the names of the model, and of its adapters."""
    service = Service.of(request)
    names = *service.config.served_model_names, *service.config.adapter_names
    return answer({"object": "list", "data": [_card(service, name) for name in names]})


@router.get("/v1/models/{name:path}")
async def model(request: Request, name: str) -> Response:
    """Describe one of them."""
    service = Service.of(request)
    return answer(_card(service, service.check_model(name)))


def _card(service: Service, name: str) -> dict[str, Any]:
    base, is_adapter = service.config.served_model_names[0], service.adapter_of(name) is not None
    return {
        "id": name,
        "object": "model",
        "created": service.created,
        "owned_by": "kvpage",
        "root": name if is_adapter else base,
        "parent": base if is_adapter else None,
        "max_model_len": service.engine.engine.max_model_len,
    }
