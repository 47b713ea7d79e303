"""close_later: the end of what is forgotten, beside the thread that the garbage collector happens to run on.

The collector runs a finalizer within any allocation, on a thread that may hold any lock by then, those of `threading`
among them, as while a thread starts. Whoever waits there, for a lock or for the end of a thread, may wait for himself.
"""

import _thread
import threading
from collections.abc import Callable


def close_later(close: Callable[[], object]) -> None:
    """Has `close` called on a thread of its own, for which the interpreter's end waits; at that end it is called here.

    Takes no lock: for finalizers.
    """
    if threading.main_thread().is_alive():
        _thread.start_new_thread(_start, (close,))  # threading.Thread.start takes locks
    else:
        close()


def _start(close: Callable[[], object]) -> None:
    threading.Thread(target=close, name="kvpage-close", daemon=False).start()
