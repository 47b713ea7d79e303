"""/v1/sessions/ID: the state of a session, actions on it, and its end.

A session begins with the first request that names it by `session_id`, or with the first of a chain of kept responses:
the id of each of these names it. It belongs to a tenant and a salt, as cached blocks do: the salt is a field of an
action, and the header X-Cache-Salt of the others.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any
from urllib.parse import unquote

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from kvpage.server.protocol.errors import REFUSED, ApiError, as_api_error
from kvpage.server.protocol.sampling_fields import MAX_SESSION_NAME
from kvpage.server.protocol.session_request import SessionRequest
from kvpage.server.routes.bodies import answer, body_of
from kvpage.server.service import Service, caller_of
from kvpage.serving.sessions.session import MAIN, Session, SessionState

router = APIRouter()
SALT_HEADER = "x-cache-salt"
Result = dict[str, Any]


@router.get("/v1/sessions/{session_id:path}")
async def show(request: Request, session_id: str) -> Response:
    """Return the state of a session."""
    return await _answered(request, session_id, _header_salt(request), lambda _: {})


@router.post("/v1/sessions/{session_id:path}")
async def act(request: Request, session_id: str) -> Response:
    """Do something with a session; return its state, and the result."""
    service = Service.of(request)
    with service.open_request() as open_request:
        body = await body_of(request, SessionRequest, open_request)
        tokens = await _tokens(service, body)
        return await _answered(
            request, session_id, body.cache_salt, lambda session: _act(service, session, body, tokens)
        )


@router.delete("/v1/sessions/{session_id:path}")
async def delete(request: Request, session_id: str) -> Response:
    """Close a session: the blocks that only it needs are evicted before all others."""

    def close(session: Session) -> Result:
        return {"deleted": True, "released_tokens": session.close()}

    return await _answered(request, session_id, _header_salt(request), close)


async def _answered(request: Request, session_id: str, salt: str | None, work: Callable[[Session], Result]) -> Response:
    """Return a session's state with the result of work on it. ApiError 404 where there is none."""
    service, caller = Service.of(request), caller_of(request)
    namespace, turn = caller.namespace(salt), service.responses.turn(caller.tenant, session_id)
    owner = caller.tenant.encode() or namespace

    def done(engine: Any) -> Result | None:
        session = engine.sessions.find(session_id, namespace, owner, has_record=turn is None)
        if session is None and turn is not None:
            session = engine.sessions.find(turn.line.session_id, namespace, owner, has_record=not turn.owns_session)
        if session is None:
            return None
        result = work(session)
        return {**shown(session.state()), **result}

    fields = None
    if service.runner.has_blocks and len(session_id) <= MAX_SESSION_NAME:
        fields = await _called(service, done)
    if fields is None:
        raise ApiError(404, f"the session {session_id[:80]!r} is not kept here, or no more", code="session_not_found")
    return answer(fields)


async def _called(service: Service, work: Callable[[Any], Result | None]) -> Result | None:
    try:
        return await asyncio.wrap_future(service.engine.call(work))
    except KeyError as error:
        raise ApiError(404, str(error.args[0]), param="branch", code="branch_not_found") from error
    except REFUSED as error:
        raise as_api_error(error) from error


def _act(service: Service, session: Session, body: SessionRequest, tokens: Sequence[int]) -> Result:
    """Do an action on the engine's thread."""
    most, branch = service.config.max_pin_seconds, body.branch or MAIN
    if body.action == "retain":
        ttl = min(body.ttl_seconds or most, most)
        priority = min(body.priority, service.config.max_retain_priority)
        return {"retained_blocks": session.retain(ttl, body.tier, priority)}
    if body.action == "pause":
        return {"paused_in": session.pause(min(body.expected_seconds or most, most))}
    if body.action == "branch":
        source = body.source or MAIN
        if source not in session.branches:
            raise ApiError(404, f"source must be a branch, got {source!r}", param="source", code="branch_not_found")
        session.branch(branch, source, body.num_tokens)
    elif body.action == "release":
        return {"released_tokens": session.release(branch)}
    elif body.action == "edit":
        start, end = body.start or 0, body.end or 0
        num_left = session.branches.get(branch, 0) - (end - start if body.mode == "exact" else 0)
        _check_length(service, num_left + len(tokens))
        cost = session.edit(start, end, tokens, branch, body.mode)
        return {"edit": asdict(cost)}
    else:
        session.resume()
    return {}


def _check_length(service: Service, num_tokens: int) -> None:
    """ApiError 400 for a branch that no request could have: it would only take the room of others."""
    most = service.limits.max_model_len
    if num_tokens > most:
        raise ApiError(400, f"a branch must have at most {most} tokens, got {num_tokens}", param="tokens")


async def _tokens(service: Service, body: SessionRequest) -> Sequence[int]:
    """Return the tokens of an edit. ApiError 400 for ids outside of the vocabulary."""
    if body.text is not None:
        return await service.text.encode(body.text, add_special_tokens=False)
    service.check_ids(body.tokens or [])
    return body.tokens or []


def shown(state: SessionState) -> Result:
    """Return a session's state as plain values.

    Args:
        state: The state.
    """
    retention = None if state.retention is None else asdict(state.retention)
    return {
        "id": state.session_id,
        "object": "session",
        "branches": [asdict(branch) for branch in state.branches],
        "retention": retention,
        "paused_in": state.paused_in,
        "due_in": state.due_in,
        "num_turns": state.num_turns,
        "edits": [asdict(edit) for edit in state.edits],
    }


def _header_salt(request: Request) -> str | None:
    return unquote(request.headers.get(SALT_HEADER, "")) or None
