"""TorchThreads: torch's operators keep to one thread while a view's native layers compute with all of them.

    native layer    ████████            both cores, by kvpage's own threads
    torch           ████▒▒▒▒            a sum, in two threads: torch's second one then spins for milliseconds
    native layer    ████░░░░████        one core of two has to be shared with it
    torch, limited  ████                the same sum in one thread; the next layer has both cores

OpenMP keeps the number of threads for each thread of the program by itself, and torch asks OpenMP for it. So other
threads, and those that start meanwhile, have the numbers that they had.
"""

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch


class TorchThreads:
    """The limit of one view, which is for one thread.

    caller: the caller's torch.get_num_threads(), while torch has one thread; None otherwise. Native
    layers use that number.
    Does nothing where torch's threads are not those of an OpenMP runtime that this process shows.
    """

    __slots__ = ("caller", "_set")

    def __init__(self, find: Callable[[], Callable[[int], object] | None] | None = None) -> None:
        """Args: find: returns OpenMP's omp_set_num_threads, or None; by default that of the process."""
        self._set = (find or openmp_setter)()
        self.caller: int | None = None

    @property
    def can_limit(self) -> bool:
        """Whether torch keeps to one thread inside of `limited`."""
        return self._set is not None or torch.get_num_threads() == 1

    @contextmanager
    def limited(self) -> Iterator[None]:
        """Inside, torch's operators have one thread. One within another does nothing."""
        num = torch.get_num_threads()
        if self._set is None or num == 1 or self.caller is not None:
            yield
            return
        try:
            self.caller = num
            self._set(1)
            yield
        finally:
            self.caller = None
            self._set(num)

    @contextmanager
    def lifted(self) -> Iterator[None]:
        """Inside, torch's operators have the caller's number again, whether there is a limit or not."""
        num = self.caller
        if num is None or self._set is None:
            yield
            return
        try:
            self.caller = None
            self._set(num)
            yield
        finally:
            self.caller = num
            self._set(1)


def openmp_setter() -> Callable[[int], object] | None:
    """Return omp_set_num_threads of the OpenMP that torch asks for its number of threads; None if it asks none."""
    try:  # a few instructions: the GIL stays
        setter = ctypes.PYFUNCTYPE(None, ctypes.c_int)(("omp_set_num_threads", ctypes.PyDLL(None)))
    except (AttributeError, OSError, TypeError):  # no such runtime; Windows has no names of the process
        return None
    return setter if is_torchs(setter) else None


def is_torchs(set_num_threads: Callable[[int], object]) -> bool:
    """Return whether torch sees the number that is set. The calling thread's is another for the moment."""
    before = torch.get_num_threads()
    try:
        set_num_threads(before + 1)
        return torch.get_num_threads() == before + 1
    finally:
        set_num_threads(before)
