"""KeptResponses: the last responses of each tenant, for those that follow them.

A response keeps its own messages, and the id of the one before it. Where room lacks, the tenant that has most forgets
the one that it used longest ago: no tenant's work pushes out the few responses of another. An earlier one of a chain
outlives the later ones.

A chain of responses is a session: see ResponseTurns. A response that makes room leaves the session as it is.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pydantic_core

from kvpage.server.protocol.errors import ApiError
from kvpage.server.running.response_turns import Leaving, ResponseTurn, ResponseTurns

Fields = dict[str, Any]


@dataclass(frozen=True, slots=True)
class KeptResponse:
    """A response, as JSON: objects would take up to a hundred times its bytes.

    Attributes:
        response: Its fields.
        messages: Those of its input, and the model's answer.
        previous: The id of the response before it; None for the first one.
        turn: Of which session it is a turn; None for none.
    """

    response: bytes
    messages: bytes
    previous: str | None
    turn: ResponseTurn | None = None

    @property
    def num_bytes(self) -> int:
        """The bytes that count."""
        return len(self.response) + len(self.messages)


@dataclass(slots=True)
class TenantResponses:
    """The responses of one tenant.

    Attributes:
        by_id: The responses, least recently used first.
        num_bytes: Bytes of all of them.
    """

    by_id: OrderedDict[str, KeptResponse] = field(default_factory=OrderedDict)
    num_bytes: int = 0

    def add(self, response_id: str, response: KeptResponse) -> None:
        """Add a response."""
        self.by_id[response_id] = response
        self.num_bytes += response.num_bytes

    def remove(self, response_id: str) -> None:
        """Remove a response."""
        self.num_bytes -= self.by_id.pop(response_id).num_bytes

    def touch(self, response_id: str | None) -> None:
        """Note that a response and those before it were used, the first one as the last."""
        while response_id is not None and (response := self.by_id.get(response_id)) is not None:
            self.by_id.move_to_end(response_id)
            response_id = response.previous


class KeptResponses:
    """The last responses of all tenants. Any thread may call it: long answers are written beside the event loop.

    Args:
        max_responses: Responses at most.
        max_bytes: Bytes of all of them at most.
    """

    def __init__(self, max_responses: int, max_bytes: int) -> None:
        self._max_responses, self._max_bytes = max_responses, max_bytes
        self._tenants: dict[str, TenantResponses] = {}
        self._turns = ResponseTurns()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return sum(len(tenant.by_id) for tenant in self._tenants.values())

    @property
    def keeps_some(self) -> bool:
        """Whether there is room for any."""
        return self._max_responses > 0 and self._max_bytes > 0

    @property
    def num_bytes(self) -> int:
        """Bytes of all of them."""
        return sum(tenant.num_bytes for tenant in self._tenants.values())

    def begin_turn(
        self, tenant: str, response_id: str, previous: str | None, namespace: bytes, adapter: str | None
    ) -> ResponseTurn:
        """Return of which session a response becomes a turn. `end_turn` is to follow.

        Args:
            tenant: Whose it is.
            response_id: Its id.
            previous: The id of the response before it; None for the first one.
            namespace: Of its request.
            adapter: That computes it; None for none.
        """
        with self._lock:
            return self._turns.begin(response_id, self._earlier_turns(tenant, previous), namespace, adapter)

    def end_turn(self, response_id: str, turn: ResponseTurn) -> Leaving | None:
        """Note that a response of `begin_turn` has ended; where it is not kept, return what its session loses."""
        with self._lock:
            return self._turns.end(response_id, turn)

    def turn(self, tenant: str, response_id: str) -> ResponseTurn | None:
        """Return what a response is a turn of; None for nothing, or without the response."""
        with self._lock:
            response = self._tenants.get(tenant, TenantResponses()).by_id.get(response_id)
            return None if response is None else response.turn

    def keep(
        self,
        tenant: str,
        response: Fields,
        messages: list[Fields],
        previous: str | None,
        turn: ResponseTurn | None = None,
    ) -> None:
        """Keep a response, and forget others where room lacks. One that is too large is not kept."""
        entry = KeptResponse(pydantic_core.to_json(response), pydantic_core.to_json(messages), previous, turn)
        if entry.num_bytes > self._max_bytes:
            return
        with self._lock:
            responses = self._tenants.setdefault(tenant, TenantResponses())
            responses.add(response["id"], entry)
            responses.touch(response["id"])
            if turn is not None:
                self._turns.add(response["id"], turn, response["usage"]["total_tokens"])
            while len(self) > self._max_responses:
                self._make_room(lambda name: len(self._tenants[name].by_id))
            while self.num_bytes > self._max_bytes:
                self._make_room(lambda name: self._tenants[name].num_bytes)

    def response(self, tenant: str, response_id: str) -> bytes:
        """Return a response as JSON. ApiError 404 for one that is not kept."""
        with self._lock:
            return self._entry(tenant, response_id).response

    def forget(self, tenant: str, response_id: str) -> Leaving | None:
        """Forget a response; return what its session loses by it. ApiError 404 for one that is not kept."""
        with self._lock:
            self._entry(tenant, response_id)
            return self._remove(tenant, response_id)

    def messages(self, tenant: str, response_id: str | None) -> list[Fields]:
        """Return the messages of a response and of all before it. ApiError 404 if one of them is not kept."""
        chain, first = list[KeptResponse](), response_id
        with self._lock:
            while response_id is not None:
                chain.append(self._entry(tenant, response_id, "previous_response_id"))
                response_id = chain[-1].previous
            if tenant in self._tenants:
                self._tenants[tenant].touch(first)
        return [message for response in reversed(chain) for message in pydantic_core.from_json(response.messages)]

    def _entry(self, tenant: str, response_id: str, param: str | None = None) -> KeptResponse:
        responses = self._tenants.get(tenant)
        response = None if responses is None else responses.by_id.get(response_id)
        if response is None:
            message = f"the response {response_id[:80]!r} is not kept here, or no more"
            raise ApiError(404, message, param=param, code="response_not_found")
        return response

    def _make_room(self, share_of: Callable[[str], int]) -> None:
        """Forget the oldest response of the tenant with the largest share."""
        tenant = max(self._tenants, key=share_of)
        self._remove(tenant, next(iter(self._tenants[tenant].by_id)))

    def _remove(self, tenant: str, response_id: str) -> Leaving | None:
        turn = self._tenants[tenant].by_id[response_id].turn
        self._tenants[tenant].remove(response_id)
        if not self._tenants[tenant].by_id:
            del self._tenants[tenant]
        return None if turn is None else self._turns.remove(response_id, turn)

    def _earlier_turns(self, tenant: str, response_id: str | None) -> list[tuple[str, ResponseTurn]]:
        """Return the turns of a response and of those before it, as far as they are kept, the last one first."""
        turns, responses = list[tuple[str, ResponseTurn]](), self._tenants.get(tenant, TenantResponses()).by_id
        while response_id is not None and (response := responses.get(response_id)) is not None:
            if response.turn is not None:
                turns.append((response_id, response.turn))
            response_id = response.previous
        return turns
