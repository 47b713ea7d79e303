"""A registrar of pinned memory without a GPU: it knows what is registered, and can fail."""

import errno
import threading

import kvpage._C as _C
from kvpage.layout.pinned_memory import PAGE_BYTES


class FakeRegistrar:
    """held: bytes by address. calls: what was called, in order. failing_call: the registration that fails, from 0.

    Raises AssertionError for pages that are registered already, or are not whole, or are not there.
    """

    def __init__(self, failing_call: int | None = None) -> None:
        self.held: dict[int, int] = {}
        self.calls: list[tuple[str, int]] = []
        self.threads: set[int] = set()
        self.failing_call, self.is_stuck = failing_call, False
        self._lock = threading.Lock()

    def register(self, address: int, num_bytes: int) -> None:
        with self._lock:
            number = len(self.calls)
            self.calls.append(("register", address))
            self.threads.add(threading.get_ident())
            if number == self.failing_call:
                raise OSError(errno.ENOMEM, "the fake fails")
            assert address % PAGE_BYTES == 0 and num_bytes % PAGE_BYTES == 0 and num_bytes > 0
            for begin, count in self.held.items():
                assert address + num_bytes <= begin or begin + count <= address, "registered twice"
            _C.prefault(address, num_bytes, 1)  # raises where the pages are not mapped
            self.held[address] = num_bytes

    def unregister(self, address: int) -> None:
        with self._lock:
            self.calls.append(("unregister", address))
            if self.is_stuck:
                raise OSError(errno.EINVAL, "the fake is stuck")
            _C.prefault(address, self.held.pop(address), 1)  # still mapped
