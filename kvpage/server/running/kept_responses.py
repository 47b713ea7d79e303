"""KeptResponses: the last responses, for those that follow them.

A response keeps its own messages, and the id of the one before it. The ones that were used last stay; an earlier one of
a chain outlives the later ones.
"""

import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import pydantic_core

from kvpage.server.protocol.errors import ApiError

Fields = dict[str, Any]


@dataclass(frozen=True, slots=True)
class KeptResponse:
    """A response, as JSON: objects would take up to a hundred times its bytes.

    Attributes:
        response: Its fields.
        messages: Those of its input, and the model's answer.
        previous: The id of the response before it; None for the first one.
    """

    response: bytes
    messages: bytes
    previous: str | None

    @property
    def num_bytes(self) -> int:
        """The bytes that count."""
        return len(self.response) + len(self.messages)


class KeptResponses:
    """The last responses of all tenants. Any thread may call it: long answers are written beside the event loop.

    Args:
        max_responses: Responses at most.
        max_bytes: Bytes of all of them at most.

    Attributes:
        num_bytes: Bytes of all of them.
    """

    def __init__(self, max_responses: int, max_bytes: int) -> None:
        self._max_responses, self._max_bytes, self.num_bytes = max_responses, max_bytes, 0
        self._kept: OrderedDict[tuple[str, str], KeptResponse] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, tenant: str, response: Fields, messages: list[Fields], previous: str | None) -> None:
        """Keep a response, and forget those that were not used for longest. One that is too large is not kept."""
        entry = KeptResponse(pydantic_core.to_json(response), pydantic_core.to_json(messages), previous)
        if entry.num_bytes > self._max_bytes:
            return
        with self._lock:
            self._kept[tenant, response["id"]] = entry
            self.num_bytes += entry.num_bytes
            self._touch(tenant, response["id"])
            while len(self._kept) > self._max_responses or self.num_bytes > self._max_bytes:
                self.num_bytes -= self._kept.popitem(last=False)[1].num_bytes

    def response(self, tenant: str, response_id: str) -> bytes:
        """Return a response as JSON. ApiError 404 for one that is not kept."""
        with self._lock:
            return self._entry(tenant, response_id).response

    def forget(self, tenant: str, response_id: str) -> None:
        """Forget a response. ApiError 404 for one that is not kept."""
        with self._lock:
            self.num_bytes -= self._entry(tenant, response_id).num_bytes
            del self._kept[tenant, response_id]

    def messages(self, tenant: str, response_id: str | None) -> list[Fields]:
        """Return the messages of a response and of all before it. ApiError 404 if one of them is not kept."""
        chain, first = list[KeptResponse](), response_id
        with self._lock:
            while response_id is not None:
                chain.append(self._entry(tenant, response_id, "previous_response_id"))
                response_id = chain[-1].previous
            self._touch(tenant, first)
        return [message for response in reversed(chain) for message in pydantic_core.from_json(response.messages)]

    def _entry(self, tenant: str, response_id: str, param: str | None = None) -> KeptResponse:
        response = self._kept.get((tenant, response_id))
        if response is None:
            message = f"the response {response_id[:80]!r} is not kept here, or no more"
            raise ApiError(404, message, param=param, code="response_not_found")
        return response

    def _touch(self, tenant: str, response_id: str | None) -> None:
        """Note that a response and those before it were used, the first one as the last."""
        while response_id is not None and (response := self._kept.get((tenant, response_id))) is not None:
            self._kept.move_to_end((tenant, response_id))
            response_id = response.previous
