"""FamilyWorker: judges types in a process of its own, which may take neither all memory nor all time."""

import multiprocessing
import resource
import warnings
from multiprocessing.connection import Connection

import torch
import transformers as tf
from support.family import Family, judge

MAX_BYTES = 8 << 30


class FamilyWorker:
    """One process for one type after the other; after a type that has to be stopped, another process.

    seconds: for one type. A model's default sizes may fill memory for many minutes.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._start()

    def judge(self, kind: str) -> Family:
        """Return the findings of `judge`, or how the process ended."""
        self._connection.send(kind)
        try:
            if self._connection.poll(self._seconds):
                return self._connection.recv()
            trouble = f"not tried: it took more than {self._seconds:g} s"
        except EOFError:
            trouble = "not tried: the process ended"
        self.close()
        self._start()
        return Family(kind, trouble=trouble)

    def close(self) -> None:
        self._process.kill()
        self._process.join()
        self._connection.close()

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()


def serve(connection: Connection) -> None:
    """The process: answers each type with its Family."""
    resource.setrlimit(resource.RLIMIT_AS, (MAX_BYTES, MAX_BYTES))
    warnings.simplefilter("ignore")
    tf.logging.set_verbosity(tf.logging.CRITICAL)
    torch.set_num_threads(1)
    while True:
        connection.send(judge(connection.recv()))
