"""Links: what stands beside the serving loop: a store of chunks, segments that are kept for blending, both, or neither.

a request waits ─► ask ─► holds it while something is on its way ─► it is scheduled, or forgotten
its prefill is done ─► keep, while its blocks are as they were computed ─► save, when they can be found
"""

from collections.abc import Iterable, Sequence

from kvpage.serving.blending.link import BlendLink
from kvpage.serving.loop.store_link import StoreLink
from kvpage.serving.requests import Request


class Links:
    """Either may be None. All methods are for the engine's thread."""

    def __init__(self) -> None:
        self.store: StoreLink | None = None
        self.blend: BlendLink | None = None

    def ask(self, waiting: Iterable[Request]) -> None:
        """Goes on with what is under way, and asks for what the waiting requests can use."""
        for link in self._all():
            link.ask(waiting)

    def holds(self, request: Request) -> bool:
        """Whether the request had better wait."""
        return any(link.holds(request) for link in self._all())

    def wait(self) -> None:
        """Until something has come, or is late."""
        if self.blend and self.blend.is_busy:
            self.blend.wait()
        elif self.store:
            self.store.wait()

    def keep(self, requests: Iterable[Request]) -> None:
        """Their prefills are written, and not committed yet."""
        if self.blend:
            for request in _prefilled(requests):
                self.blend.keep(request)

    def save(self, requests: Iterable[Request]) -> None:
        """Their prefills are committed."""
        if self.store:
            for request in _prefilled(requests):
                self.store.save(request, request.num_tokens)

    def save_generated(self, request: Request) -> None:
        """It has finished, and has its blocks still."""
        if self.store and self.store.save_generated:
            self.store.save(request, request.num_computed)

    def saw_prefill(self, num_tokens: int, seconds: float) -> None:
        """So long computing takes: what loading is compared with."""
        if self.store and self.store.rule:
            self.store.rule.saw_prefill(num_tokens, seconds)

    def forget(self, request: Request) -> None:
        """The request has ended."""
        for link in self._all():
            link.forget(request)

    def forget_found(self, requests: Iterable[Request]) -> None:
        """Segments that were found for them are looked up again."""
        for request in requests:
            request.reusable, request.wanted_spans = None, []

    def forget_kept(self) -> None:
        """Segments that are kept are forgotten, where what keeps them can do that."""
        if self.blend:
            self.blend.forget_kept()

    def drain(self) -> None:
        """Waits for what is on its way. Whatever interrupts it, it may be called again."""
        for link in self._all():
            link.drain()

    def close(self) -> None:
        """Waits for what is on its way, and lets go of both."""
        for link in self._all():
            link.close()
        self.store = self.blend = None

    def _all(self) -> Sequence[StoreLink | BlendLink]:
        return [link for link in (self.store, self.blend) if link]


def _prefilled(requests: Iterable[Request]) -> list[Request]:
    return [request for request in requests if request.num_generated == 0]
