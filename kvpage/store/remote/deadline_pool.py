"""DeadlinePool: threads for calls with a deadline that holds, whatever is called.

    call(function, timeout) ─► an idle thread, or a new one ─► result
             │ too late
             └──► the caller goes on; give_up(thread) closes the thread's connection, again and again until
                  the call has returned, and the thread ends

A socket's timeout bounds each read alone: a server that sends a byte now and then never exceeds it, and looking up a
name has none at all. So the calls run on threads of their own, and a late one is abandoned. It keeps its place among
`max_threads` until it returns.
"""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from typing import Any, Generic, TypeVar

T = TypeVar("T")
IDLE_SECONDS = 30.0  # until an idle thread ends
FIRST_PAUSE, LONGEST_PAUSE = 0.1, 2.0  # seconds between calls of give_up


class _Call(Generic[T]):
    def __init__(self, function: Callable[[], T]) -> None:
        self.function = function
        self.future: Future[T] = Future()
        self.done = threading.Event()
        self.is_late = False


class DeadlinePool:
    """Threads that make calls. Thread-safe.

    give_up: called on another thread with the identity of the thread whose call is late, again and again until that
    call returns, since the first may come before there is anything to close. None for nothing.
    """

    def __init__(self, max_threads: int = 8, give_up: Callable[[int], None] | None = None) -> None:
        if max_threads < 1:
            raise ValueError(f"max_threads must be positive, got {max_threads}")
        self._room = threading.BoundedSemaphore(max_threads)
        self._give_up = give_up
        self._lock = threading.Lock()
        self._idle: list[_Worker] = []
        self._is_closed = False

    def call(self, function: Callable[[], T], timeout: float | None) -> T:
        """Return the function's result, or raise its error.

        Raises TimeoutError after `timeout` seconds (None: never), also if no thread became free.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        if not self._room.acquire(timeout=timeout if timeout is None else max(timeout, 0)):
            raise TimeoutError(f"all threads were busy for {timeout} s")
        call = _Call(function)
        try:
            worker = self._take_worker()
        except BaseException:
            self._room.release()
            raise
        worker.queue.put(call)
        if not call.done.wait(None if deadline is None else max(deadline - time.monotonic(), 0)):
            self._leave(call, worker, timeout)
        return call.future.result()

    def close(self) -> None:
        """End idle threads now and the others after their calls. Does not wait."""
        with self._lock:
            self._is_closed, idle, self._idle = True, self._idle, []
        for worker in idle:
            worker.queue.put(None)

    def _take_worker(self) -> "_Worker":
        with self._lock:
            if self._is_closed:
                raise RuntimeError("the pool is closed")
            if self._idle:
                return self._idle.pop()
        worker = _Worker(self)
        worker.start()
        return worker

    def _leave(self, call: _Call[Any], worker: "_Worker", timeout: float | None) -> None:
        with self._lock:
            if call.done.is_set():
                return  # just in time
            call.is_late = True
        if self._give_up is not None and worker.ident is not None:
            threading.Thread(target=_give_up, args=(self._give_up, call, worker.ident), daemon=True).start()
        raise TimeoutError(f"no answer within {timeout} s")

    def _returned(self, call: _Call[Any], worker: "_Worker") -> bool:
        """Return whether the worker stays for another call."""
        with self._lock:
            stays = not call.is_late and not self._is_closed
            if stays:
                self._idle.append(worker)
            call.done.set()
        self._room.release()
        return stays

    def _dismissed(self, worker: "_Worker") -> bool:
        """Take the worker from the idle ones; return False if it was taken for a call, which is on its way."""
        with self._lock:
            if worker not in self._idle:
                return False
            self._idle.remove(worker)
            return True


def _give_up(give_up: Callable[[int], None], call: _Call[Any], thread_id: int) -> None:
    pause = FIRST_PAUSE
    while not call.done.is_set():
        give_up(thread_id)
        call.done.wait(pause)
        pause = min(pause * 2, LONGEST_PAUSE)


class _Worker(threading.Thread):
    """A daemon: a call that never returns does not keep the process."""

    def __init__(self, pool: DeadlinePool) -> None:
        super().__init__(name="kvpage-store-call", daemon=True)
        self.queue: SimpleQueue[_Call[Any] | None] = SimpleQueue()
        self._pool = pool

    def run(self) -> None:
        while (call := self._next()) is not None:
            try:
                call.future.set_result(call.function())
            except BaseException as error:  # the caller gets it from the future
                call.future.set_exception(error)
            if not self._pool._returned(call, self):
                return
            del call  # and the buffers that it holds

    def _next(self) -> _Call[Any] | None:
        """Return the next call; None after so long without one that the thread may end."""
        while True:
            try:
                return self.queue.get(timeout=IDLE_SECONDS)
            except Empty:
                if self._pool._dismissed(self):
                    return None
