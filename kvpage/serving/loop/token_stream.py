"""TokenStream: the tokens of one request, as its caller takes them."""

from collections.abc import Callable, Iterator

from kvpage.checks.interrupts import uninterrupted
from kvpage.serving.loop.outputs import FinishReason, RequestOutput, StepOutput


class TokenStream(Iterator[int]):
    """An iterator over a request's generated tokens. The request lives as long as it: closed, dropped or ended by an
    exception before its last token, it aborts the request, also before the first.

        stream = engine.stream(tokens, params)
        for token in stream: ...
        stream.finish_reason     "stop", "length", "error" (then `stream.error` says why) or "abort"

    output: what came of the request, when it has run to its end; None before, and after an abort.

    take: computes until there is a token or an error, and returns it. drop: ends the request if it has not finished;
    for `close`. forget: has that done later, without a lock; for the garbage collector, which runs amid anything.
    """

    def __init__(
        self, take: Callable[[], StepOutput], drop: Callable[[], object], forget: Callable[[], object]
    ) -> None:
        self._take, self._drop, self._forget = take, drop, forget
        self._is_over = False
        self.output: RequestOutput | None = None

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why there are no more tokens; None while there may be. "abort" for a stream that was closed, or whose request
        somebody aborted.
        """
        if self.output is not None:
            return self.output.finish_reason
        return "abort" if self._is_over else None

    @property
    def error(self) -> str | None:
        """The reason of the finish_reason "error"; else None."""
        return self.output.error if self.output is not None else None

    def __next__(self) -> int:
        if self._is_over:
            raise StopIteration
        try:
            taken = self._take()
            self.output = taken.output
            self._is_over = taken.output is not None
        except BaseException:  # an interrupt too
            self.close()
            raise
        if taken.token_id is None:
            raise StopIteration
        return taken.token_id

    @uninterrupted
    def close(self) -> None:
        """Aborts the request, if it has not finished; during a step, when that is over. No more tokens come then."""
        if not self._is_over:
            self._is_over = True
            self._drop()

    def __del__(self) -> None:
        if not self._is_over:
            self._forget()
