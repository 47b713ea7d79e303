"""EndedRequests: the requests that ended last, without their tokens, for the page's lanes."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvpage.blocks.explain import Explanation
from kvpage.serving import LiveRequest, RequestOutput

MAX_ENDED, MAX_LEAVING = 256, 32


@dataclass(frozen=True, slots=True)
class Ended:
    """A request that has ended.

    Attributes:
        namespace: The namespace of its blocks.
        parts: Its values for the page.
        time: Seconds of time.monotonic() when it ended.
    """

    namespace: bytes
    parts: dict[str, Any]
    time: float

    def lane(self, now: float) -> dict[str, Any]:
        """Return the values for the page, with its age.

        Args:
            now: Seconds of time.monotonic().
        """
        return {**self.parts, "ago": now - self.time}


class EndedRequests:
    """The last MAX_ENDED requests that have ended."""

    def __init__(self) -> None:
        self._ended: deque[Ended] = deque(maxlen=MAX_ENDED)
        self._leaving: deque[tuple[LiveRequest, bytes]] = deque(maxlen=MAX_LEAVING)

    def follow(self, requests: Sequence[LiveRequest], namespace: bytes) -> None:
        """Note the requests of a stream that has ended. Aborted requests have their outcomes soon.

        Args:
            requests: The requests.
            namespace: The namespace of their blocks.
        """
        self._leaving.extend((request, namespace) for request in requests)
        self._settle()

    def note(self, output: RequestOutput, namespace: bytes) -> None:
        """Note that a request has ended.

        Args:
            output: Its outcome.
            namespace: The namespace of its blocks.
        """
        num_prompt, num_found = len(output.prompt_token_ids), output.num_cached_tokens
        has_begun = output.first_token_time is not None
        parts = {
            "id": output.request_id,
            "stage": output.finish_reason,
            "prompt": num_prompt,
            "cached": num_found - output.num_loaded_tokens,
            "loaded": output.num_loaded_tokens,
            "computed": num_prompt - num_found if has_begun else 0,
            "generated": sum(len(sample.token_ids) for sample in output.samples),
            "seconds": output.finish_time - output.arrival_time,
            "why": why(output.explanation),
        }
        self._ended.append(Ended(namespace, parts, output.finish_time))

    def of(self, namespaces: tuple[bytes, ...]) -> list[Ended]:
        """Return the requests of these namespaces, the last one first.

        Args:
            namespaces: Whose requests.
        """
        self._settle()
        return [request for request in reversed(self._ended) if request.namespace in namespaces]

    def _settle(self) -> None:
        """Note the left requests that have ended since."""
        leaving = [*self._leaving]
        self._leaving.clear()
        for request, namespace in leaving:
            if request.output is None:
                self._leaving.append((request, namespace))
            else:
                self.note(request.output, namespace)


def why(explanation: Explanation | None) -> list[str] | None:
    """Return why the cache reached no further into a prompt, a line for each group of layers.

    Args:
        explanation: At its first admission; None where there is none.
    """
    return None if explanation is None else [str(group) for group in explanation.groups]
