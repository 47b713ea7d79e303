"""Turns: what a waiting request gets before it is admitted.

its turn comes: a place, and room for its blocks ─► begin ─► it is passed over while something comes for it
it is admitted                                   ─► hand_over: blocks that were taken for it are free again
"""

from kvpage.serving.loop.request import Request


class Turns:
    """Nothing comes for any request. `Connectors` bring something."""

    def holds(self, request: Request) -> bool:
        """Whether something is on its way that the request does better to wait for. It comes in a finite time."""
        return False

    def has_blocks(self, request: Request) -> bool:
        """Whether blocks for all of its tokens are taken already."""
        return False

    def begin(self, request: Request, num_spare: int) -> bool:
        """Bring what its turn is for, as far as that leaves `num_spare` blocks; return whether it is to wait.

        A request that does not wait is admitted next, if its blocks fit.
        """
        return False

    def hand_over(self, request: Request) -> None:
        """Give back the blocks of its load: they are cached, and the request is admitted now."""
