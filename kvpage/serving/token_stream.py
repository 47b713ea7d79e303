"""TokenStream: the tokens of one request, as its caller takes them."""

from collections.abc import Callable, Iterator

from kvpage.interrupts import uninterrupted
from kvpage.serving.requests import StepOutput


class TokenStream(Iterator[int]):
    """An iterator over a request's generated tokens. The request lives as long as it: closed, dropped or ended by an
    exception before its last token, it aborts the request, also before the first.

    take: computes until there is a token, and returns it. drop: ends the request if it has not finished; for `close`.
    forget: has that done later, without a lock; for the garbage collector, which runs amid anything.
    """

    def __init__(
        self, take: Callable[[], StepOutput], drop: Callable[[], object], forget: Callable[[], object]
    ) -> None:
        self._take, self._drop, self._forget = take, drop, forget
        self._is_over = False

    def __next__(self) -> int:
        if self._is_over:
            raise StopIteration
        try:
            token = self._take()
            self._is_over = token.output is not None
        except BaseException:  # an interrupt too
            self.close()
            raise
        return token.token_id

    @uninterrupted
    def close(self) -> None:
        """Aborts the request, if it has not finished; during a step, when that is over. No more tokens come then."""
        if not self._is_over:
            self._is_over = True
            self._drop()

    def __del__(self) -> None:
        if not self._is_over:
            self._forget()
