"""TokenStream: the tokens of one request, as its caller takes them."""

from collections.abc import Callable, Iterator

from kvpage.checks.interrupts import uninterrupted
from kvpage.serving.loop.outputs import FinishReason, RequestOutput, StepOutput


class TokenStream(Iterator[int]):
    """An iterator over a request's generated tokens. Closed or dropped before its last token, it aborts the request.

    An exception ends both, too.

        stream = engine.stream(tokens, params)
        for token in stream: ...
        stream.finish_reason     "stop", "length", "error" (then `stream.error` says why) or "abort"

    Args:
        take: Computes until there is a token or an error, and returns it.
        drop: Ends the request if it has not finished; for `close`.
        forget: Has that done later, without a lock; for the garbage collector, which runs amid anything.

    Attributes:
        output: The outcome of a request that has run to its end; None before, and after an abort.
    """

    def __init__(
        self, take: Callable[[], StepOutput], drop: Callable[[], object], forget: Callable[[], object]
    ) -> None:
        self._take, self._drop, self._forget = take, drop, forget
        self._is_over = False
        self.output: RequestOutput | None = None

    @property
    def finish_reason(self) -> FinishReason | None:
        """The reason why there are no more tokens; None while there may be.

        "abort" means that the stream was closed, or its request aborted.
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
            step_output = self._take()
            self.output = step_output.output
            self._is_over = step_output.output is not None
        except BaseException:  # an interrupt too
            self.close()
            raise
        if step_output.token_id is None:
            raise StopIteration
        return step_output.token_id

    @uninterrupted
    def close(self) -> None:
        """Abort the request if it has not finished; during a step, after it. No more tokens come then."""
        if not self._is_over:
            self._is_over = True
            self._drop()

    def __del__(self) -> None:
        if not self._is_over:
            self._forget()
