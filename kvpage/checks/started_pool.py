"""started_pool: a pool of threads that all run from the beginning.

A pool of the standard library starts its threads when they are needed. Where the system has no more to give, `submit`
then raises, and the job stays queued all the same: it would run when whoever has asked for it has given up, and write
into memory that is somebody else's by then.
"""

import threading
from concurrent.futures import ThreadPoolExecutor


def started_pool(num_threads: int, name: str) -> ThreadPoolExecutor:
    """RuntimeError if the threads cannot be had; then there are none."""
    pool, started = ThreadPoolExecutor(num_threads, thread_name_prefix=name), threading.Event()
    try:
        for _ in range(num_threads):
            pool.submit(started.wait)  # an idle thread would take the next one, and none would be started for it
    except BaseException:
        started.set()
        pool.shutdown(cancel_futures=True)
        raise
    started.set()
    return pool
