"""started_pool: a pool of threads that all run from the beginning.

A pool of the standard library starts its threads when they are needed. Where the system can start no more, `submit`
raises, and yet the job stays queued. It would run after its caller has given up, and write into memory that belongs to
another owner by then.
"""

import threading
from concurrent.futures import ThreadPoolExecutor


def started_pool(num_threads: int, name: str) -> ThreadPoolExecutor:
    """Return a pool whose threads have all been started.

    Raises:
        RuntimeError: The threads cannot be started. Then none is left running.
    """
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
