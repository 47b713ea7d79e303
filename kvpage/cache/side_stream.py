"""side_stream: a stream of its own for a thread that reads or writes a cache beside the computation."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch


def side_stream(device: torch.device) -> Callable[[], AbstractContextManager[Any]]:
    """Return a context for another thread: on a GPU a stream, after all that the calling thread has started by now.

    The stream's work is done on leaving. On a CPU the context does nothing.

    Args:
        device: The cache's device.
    """
    if device.type != "cuda":
        return nullcontext
    ready = torch.cuda.Event()  # type: ignore[no-untyped-call, unused-ignore]  # torch does not annotate it
    ready.record(torch.cuda.current_stream(device))
    return lambda: _SideStream(device, ready)


class _SideStream:
    """A stream that begins after an event, and whose work is done on leaving."""

    def __init__(self, device: torch.device, ready: torch.cuda.Event) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call, unused-ignore]  # not annotated
        self._stream.wait_event(ready)
        self._context = torch.cuda.stream(self._stream)

    def __enter__(self) -> None:
        self._context.__enter__()  # type: ignore[no-untyped-call, unused-ignore]  # torch does not annotate it

    def __exit__(self, *error: Any) -> None:
        self._context.__exit__(*error)
        self._stream.synchronize()
