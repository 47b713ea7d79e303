"""StoreLook: a store is asked how far it reaches into a prompt, in a thread. Its trouble is an answer, too."""

from collections.abc import Callable
from concurrent.futures import Executor, Future, wait

from kvpage.blocks.explain import GroupReach, StoreReach, StoreVerdict
from kvpage.store.block_store import is_count

Answer = tuple[int, tuple[GroupReach, ...]]


class StoreLook:
    """One question. answer: of how many leading tokens the store has, and of what its groups have."""

    def __init__(self, answer: "Future[Answer]") -> None:
        self._answer = answer

    @classmethod
    def begin(cls, threads: Executor, ask: Callable[[], Answer]) -> "StoreLook":
        """Ask in one of the threads."""
        return cls(threads.submit(ask))

    def wait(self, seconds: float) -> StoreReach | None:
        """Wait for the answer.

        Args:
            seconds: At most so long. A question that no thread has taken up by then is withdrawn.

        Returns:
            None once it is there; otherwise why there is none.
        """
        wait([self._answer], timeout=seconds)
        if not self._answer.done():
            self._answer.cancel()
            return StoreReach(0, StoreVerdict.LATE)
        error = self._answer.exception()
        if error is not None:
            return StoreReach(0, StoreVerdict.FAILED, error=repr(error))
        if not is_count(self.num_found):
            return StoreReach(0, StoreVerdict.FAILED, error=f"{self.num_found!r} is no number of tokens")
        return None

    @property
    def num_found(self) -> int:
        """Leading tokens that the store has."""
        return self._answer.result()[0]

    @property
    def groups(self) -> tuple[GroupReach, ...]:
        """What each group of the store has."""
        return self._answer.result()[1]
