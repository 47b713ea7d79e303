"""ErrorReports: the errors that a device's kernels have met, read beside the work without a wait.

kernels of a step ─► fetch: error word ─► pinned memory ─► the step's tokens, which the host waits for ─► check
                          on the same stream                                    the word is there by then
"""

import torch

from kvpage.ops.cuda.rows import clear_error_word, find_error_word, raise_errors


class _FetchedWord:
    """An error word on its way to the host, behind the work of the current stream."""

    def __init__(self, word: torch.Tensor) -> None:
        self._landed = torch.empty(1, dtype=torch.int32, pin_memory=True)
        self._landed.copy_(word, non_blocking=True)
        self._event = torch.cuda.Event()  # type: ignore[no-untyped-call, unused-ignore]  # torch does not annotate it
        self._event.record(torch.cuda.current_stream(word.device))

    def read(self) -> int | None:
        """Return the bits; None while they are on their way."""
        has_come = self._event.query()  # type: ignore[no-untyped-call, unused-ignore]  # torch does not annotate it
        return int(self._landed[0]) if has_come else None


class ErrorReports:
    """The error word of one device, as one loop reads it.

    Args:
        device: A CUDA device with its index. On another device there is nothing to read.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._fetched: _FetchedWord | None = None

    def fetch(self) -> None:
        """Have the word copied after the current stream's work, unless an earlier copy is on its way still."""
        word = find_error_word(self._device)
        if word is not None and self._fetched is None:
            with torch.cuda.device(self._device):
                self._fetched = _FetchedWord(word)

    def check(self) -> None:
        """Check the word that was fetched, if it has come. Each error is raised once.

        Raises:
            ValueError: A kernel met a bad id before the fetch.
        """
        bits = None if self._fetched is None else self._fetched.read()
        if bits is None:
            return
        self._fetched = None
        if bits:
            clear_error_word(self._device)
            raise_errors(bits, self._device)
