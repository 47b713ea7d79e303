"""close_later: closes a forgotten object on another thread than the one that the garbage collector runs on.

The collector runs a finalizer within any allocation. Its thread may hold any lock then, also a lock of `threading`, as
while a thread starts. A finalizer that waits for a lock, or for the end of a thread, may wait for its own thread.
"""

import _thread
import threading
from collections.abc import Callable


def close_later(close: Callable[[], object]) -> None:
    """Call `close` on a thread of its own, for which the interpreter's end waits. At that end, call it on this thread.

    It takes no lock, so finalizers may use it.
    """
    if threading.main_thread().is_alive():
        _thread.start_new_thread(_start, (close,))  # threading.Thread.start takes locks
    else:
        close()


def _start(close: Callable[[], object]) -> None:
    threading.Thread(target=close, name="kvpage-close", daemon=False).start()
