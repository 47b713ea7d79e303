"""ErrorReports: the errors that a device's kernels have met, read beside the work without a wait.

kernels of a step ─► fetch: error word ─► pinned memory ─► the step's tokens, which the host waits for ─► check
                          on the same stream                                    the word is there by then
"""

from collections import deque

import torch

from kvpage.ops.cuda.rows import clear_error_word, find_error_word, raise_errors


class _FetchedWord:
    """Room for an error word on the host, and the copy that is on its way there."""

    def __init__(self) -> None:
        self._landed = torch.empty(1, dtype=torch.int32, pin_memory=True)
        self._event = torch.cuda.Event()  # type: ignore[no-untyped-call, unused-ignore]  # torch does not annotate it

    def begin(self, word: torch.Tensor) -> None:
        """Have the word copied after the work of the current stream."""
        self._landed.copy_(word, non_blocking=True)
        self._event.record(torch.cuda.current_stream(word.device))

    def wait(self) -> None:
        """Wait until the bits have come."""
        self._event.synchronize()  # type: ignore[no-untyped-call, unused-ignore]  # torch does not annotate it

    def read(self) -> int | None:
        """Return the bits; None while they are on their way."""
        has_come = self._event.query()  # type: ignore[no-untyped-call, unused-ignore]  # torch does not annotate it
        return int(self._landed[0]) if has_come else None


class ErrorReports:
    """The error word of one device, as one loop reads it: after each pass, also where the next one has begun.

    Args:
        device: A CUDA device with its index. On another device there is nothing to read.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._under_way: deque[_FetchedWord] = deque()
        self._free: list[_FetchedWord] = []

    def fetch(self) -> None:
        """Have the word copied after the current stream's work."""
        word = find_error_word(self._device)
        if word is None:
            return
        with torch.cuda.device(self._device):
            fetched = self._free.pop() if self._free else _FetchedWord()
            fetched.begin(word)
        self._under_way.append(fetched)

    def check_all(self) -> None:
        """Wait for the passes so far, and check them.

        Raises:
            ValueError: A kernel of theirs met a bad id.
        """
        if self._under_way:
            self._under_way[-1].wait()
        self.check()

    def check(self) -> None:
        """Check the words that have come. Each error is raised once.

        Raises:
            ValueError: A kernel met a bad id before such a fetch. Passes that were begun since are not looked at.
        """
        while self._under_way:
            bits = self._under_way[0].read()
            if bits is None:
                return
            self._free.append(self._under_way.popleft())
            if bits:
                self._under_way.clear()  # they would tell the same again
                clear_error_word(self._device)
                raise_errors(bits, self._device)
