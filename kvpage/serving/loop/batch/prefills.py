"""Prefills: the prompts that are being computed, for those that wait and begin with the same tokens."""

from operator import itemgetter

from kvpage.serving.loop.batch.request_blocks import RequestBlocks
from kvpage.serving.loop.request import Request


class Prefills:
    """Running requests whose prompts are not computed yet, found by their first block.

    A waiting request that shares blocks with one of them does better to wait until these are committed. Of many
    requests with a common prefix that arrive together, the first computes it and the others find it. Where layers keep
    states, the first keeps its own where they part.
    """

    def __init__(self, blocks: RequestBlocks, running: list[Request]) -> None:
        self._blocks, self._block_size, self._enabled = blocks, blocks.block_size, blocks.can_be_shared
        self._by_first_block: dict[tuple[bytes, bytes], list[Request]] = {}
        self._new = running if self._enabled else []  # not in the dictionary: often nobody asks for them

    def add(self, request: Request) -> None:
        """Note one more."""
        if self._enabled:
            self._new.append(request)

    def will_share(self, request: Request) -> bool:
        """Whether one has yet to compute what `request` begins with, too: a block at least. It keeps its state."""
        if self._new:
            self._note_new()
        if not self._by_first_block or request.num_tokens <= self._block_size:
            return False
        others = self._by_first_block.get(self._key(request), ())
        if not self._blocks.have_states:
            return any(self._is_ahead(other, self._num_shared(request, other)) for other in others)
        shared = [(self._num_shared(request, other), other) for other in others]
        ahead = [entry for entry in shared if self._is_ahead(entry[1], entry[0])]
        if not ahead:
            return False
        num_shared, other = max(ahead, key=itemgetter(0))
        self._blocks.mark(other, num_shared)
        return True

    def _note_new(self) -> None:
        for request in self._new:
            if self._is_ahead(request, request.num_room):
                self._by_first_block.setdefault(self._key(request), []).append(request)
        self._new = []

    def _num_shared(self, request: Request, other: Request) -> int:
        length = min(request.num_tokens - 1, other.num_room)
        differ = request.tokens[:length] != other.tokens[:length]
        return int(differ.argmax()) if differ.any() else length

    def _is_ahead(self, other: Request, num_tokens: int) -> bool:
        """Whether a block of num_tokens leading tokens is yet to be computed, or the state after them."""
        if num_tokens < self._block_size:
            return False
        num_usable = num_tokens if self._blocks.have_states else num_tokens // self._block_size * self._block_size
        return num_usable > other.num_computed

    def _key(self, request: Request) -> tuple[bytes, bytes]:
        return request.namespace, request.tokens[: self._block_size].tobytes()
