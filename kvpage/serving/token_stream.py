"""TokenStream: the tokens of one request, as its caller takes them."""

from collections.abc import Callable, Iterator

from kvpage.serving.requests import StepOutput


class TokenStream(Iterator[int]):
    """An iterator over a request's generated tokens. The request lives as long as it: closed, dropped or ended by an
    exception before its last token, it aborts the request, also before the first.

    take: computes until there is a token, and returns it. abort: ends the request if it has not finished; close calls
    it. drop: the same for a stream that nobody holds any more: the garbage collector calls it when it likes.
    """

    def __init__(self, take: Callable[[], StepOutput], abort: Callable[[], object], drop: Callable[[], object]) -> None:
        self._take, self._abort, self._drop = take, abort, drop
        self._is_over = False

    def __next__(self) -> int:
        if self._is_over:
            raise StopIteration
        try:
            token = self._take()
        except BaseException:  # an interrupt too
            self.close()
            raise
        self._is_over = token.output is not None
        return token.token_id

    def close(self) -> None:
        """Aborts the request, if it has not finished. There are no more tokens then."""
        if not self._is_over:
            self._is_over = True
            self._abort()

    def __del__(self) -> None:
        if not self._is_over:
            self._drop()
