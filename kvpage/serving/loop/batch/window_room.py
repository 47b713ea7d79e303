"""WindowRoom: room in windows for the tokens of a step, and what becomes of the blocks behind them.

    decodes     all of them fit, or OutOfBlocks: a request gives its blocks back, and others go on
    portions    cut to what fits; a later step computes the rest

Windows have blocks of their own, or all layers share one table. There room is that of the table, which gives back
the blocks before the widest window, unless a layer sees everything.
"""

from collections.abc import Iterable, Sequence

from kvpage.blocks.manager import BlockManager
from kvpage.checks.errors import OutOfBlocks
from kvpage.serving.loop.request import Request


class WindowRoom:
    """The windows of one manager.

    widest: the window of a table that all layers share; None if one of them sees everything.
    is_short: whether a portion was cut since `begin`.
    """

    def __init__(self, manager: BlockManager, widest: int | None) -> None:
        self._manager, self._widest = manager, widest
        self.is_short = False

    def begin(self) -> None:
        """Plan a step anew."""
        self.is_short = False

    def has_room(self, request: Request) -> bool:
        """Whether windows have a block for a waiting request, beside those that it would find cached."""
        windows = self._manager.windows
        if not windows:
            return True
        tokens = request.tokens[: request.num_tokens]
        num_cached = self._manager.num_cached(tokens, request.namespace)
        path = self._manager.tree.look(tokens[:num_cached], request.namespace)[0]
        return windows.can_begin(path, num_cached)

    def open(self, requests: Sequence[Request]) -> None:
        """Make room for the newest tokens, which have room in the full layers.

        Raises: OutOfBlocks: they do not fit. They have no room in the full layers any more, either.
        """
        if not self._manager.windows:
            return
        seq_ids = [request.seq_id for request in requests]
        try:
            self._manager.windows.open(seq_ids, [request.num_tokens for request in requests])
        except OutOfBlocks:
            for seq_id in seq_ids:
                self._manager.give_back_room(seq_id)
            raise

    def reach(self, request: Request, end: int) -> int:
        """Make room for as many of the request's tokens as fit, up to `end`; return how many it has then."""
        reached = self._manager.windows.open_as_far(request.seq_id, end)
        self.is_short = self.is_short or reached < end
        return reached

    @property
    def gives_back(self) -> bool:
        """Whether `leave` gives blocks back."""
        return self._widest is not None

    def leave(self, requests: Iterable[Request]) -> None:
        """Give back the blocks of a shared table that no later token sees: p attends from p - window + 1 on."""
        if self._widest is not None:
            for request in requests:
                self._manager.release_before(request.seq_id, max(request.num_committed - self._widest + 1, 0))
