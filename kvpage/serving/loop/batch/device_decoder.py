"""DeviceDecoder: decode steps whose tokens stay on the device, begun one ahead of the tokens that the host knows.

    host      launch 1   launch 2   take 1 ... the caller ...   launch 3   take 2
    device               [ step 1 ] [ step 2 ------------- ]    [ step 3 ]

Step 2 reads its tokens where step 1 has left them. Each call of `Engine.step` returns the tokens that it returns
without this, and the host's work is done while the device computes.

A step is begun ahead only if the next `schedule` would make it just so: the same requests decode, none of them ends
with max_tokens, and no other can be admitted. A stop token is seen late. Then one token of that request was computed
too many, and is dropped. The same holds for a request that fails, is aborted or is preempted meanwhile.

A state is that of the last step, so a dropped step cannot be undone there. `has_computed` tells whoever wants a state
what it stands for: see Scheduler.
"""

import contextlib
from collections.abc import Callable, Collection
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from kvpage.blocks.manager import BlockManager
from kvpage.checks.errors import OutOfBlocks
from kvpage.ops.cuda.uploads import Fetch
from kvpage.serving.loop.batch.batch import Batch, Choose, Decodes
from kvpage.serving.loop.request import Request, add_room


class Fetched(Protocol):
    """Numbers on their way to the host; see Fetch."""

    def wait(self) -> npt.NDArray[Any]:
        """Return the numbers once they have come."""


class Decoding(Protocol):
    """Computes decodes; see BatchRunner."""

    def decode(
        self, decodes: Decodes, token_ids: npt.NDArray[np.int32] | torch.Tensor, choose: Choose | None
    ) -> torch.Tensor:
        """Compute the last token of each sequence, and choose the next ones, on the device."""


class Running(Protocol):
    """The requests that run and wait; see Scheduler."""

    manager: BlockManager
    waiting: list[Request]
    running: list[Request]
    max_num_seqs: int
    num_left: int

    @property
    def has_urgent(self) -> bool:
        """Whether one that waits comes before one that runs."""


class _Launched(NamedTuple):
    """A step that was begun.

    tokens: those that it chooses, on the device. rows: of the decodes among them; None for all. num_left: see
    Scheduler. error: why it could not be begun; it is raised when its turn comes.
    """

    decodes: Decodes
    num_left: int
    tokens: torch.Tensor | None = None
    fetch: Fetched | None = None
    rows: list[int] | None = None
    error: Exception | None = None

    def wait(self) -> npt.NDArray[np.int64]:
        """Return the tokens of the decodes once they have come; raise the error."""
        if self.error is not None:
            raise self.error
        assert self.fetch is not None, "a step without an error was begun"
        tokens: npt.NDArray[np.int64] = self.fetch.wait()
        return tokens if self.rows is None else tokens[self.rows]


class DeviceDecoder:
    """Decodes of one engine on a device.

    runs_ahead: begin a step before the tokens of the one before have come. draws: whether tokens can be drawn without a
        wait, too. fetch: brings tokens to the host.
    """

    def __init__(
        self,
        batch_runner: Decoding,
        scheduler: Running,
        runs_ahead: bool,
        draws: bool = True,
        fetch: Callable[[torch.Tensor], Fetched] = Fetch,
    ) -> None:
        self._batch_runner, self._scheduler, self._runs_ahead, self._fetch = batch_runner, scheduler, runs_ahead, fetch
        self._draws = draws
        self._ahead: _Launched | None = None
        self.num_ahead = 0  # steps that were begun ahead so far

    @property
    def is_ahead(self) -> bool:
        """Whether a step was begun whose turn has not come."""
        return self._ahead is not None

    def takes(self, batch: Batch) -> bool:
        """Return whether `choose` can compute the batch."""
        decodes = batch.decodes
        if batch.prefills or decodes.needs_logits:
            return False
        return decodes.is_greedy or (self._draws and not decodes.needs_tokens)

    def settle(self) -> None:
        """Wait for the step ahead if requests of it have left: others may get the blocks that it writes."""
        if self._ahead is not None and self._ahead.num_left != self._scheduler.num_left:
            self._wait_for_nothing(self._ahead)

    def resume(self) -> Batch | None:
        """Return the batch of the step ahead, but for requests that have left; None if there is none."""
        if self._ahead is None:
            return None
        decodes = self._ahead.decodes
        if self._ahead.num_left != self._scheduler.num_left:
            running = set(self._scheduler.running)
            rows = [row for row, request in enumerate(decodes.requests) if request in running]
            decodes = decodes.without([request for request in decodes.requests if request not in running])
            self._ahead = self._ahead._replace(decodes=decodes, rows=rows) if rows else None
        if self._ahead is None:
            return None
        decodes.go_on()
        return Batch(decodes, [])

    def choose(self, batch: Batch) -> npt.NDArray[np.int64]:
        """Compute the batch, unless it was the step ahead, and begin the next step; then wait for the tokens.

        Returns the next token of each decode; -1 where logits are no numbers.
        """
        launched, self._ahead = self._ahead, None
        if launched is None:
            launched = self._launch(batch.decodes, batch.decodes.newest_tokens, 0)
        try:
            if self._can_run_ahead(launched):
                self._ahead = self._launch_ahead(launched)
            return launched.wait()
        except BaseException:
            self._wait_for_nothing(launched)
            raise

    def has_computed(self, request: Request) -> bool | None:
        """Return whether the step ahead has computed a request's newest token; None if the request is not in it.

        It waits for the step. False: the step could not be begun, or has failed, or the logits are no numbers.
        """
        ahead = self._ahead
        if ahead is None or request not in ahead.decodes.requests:
            return None
        if ahead.error is None:
            with contextlib.suppress(RuntimeError):  # of the device, see _wait_for_nothing
                return bool(ahead.wait()[ahead.decodes.requests.index(request)] >= 0)
        return False

    def let_go(self) -> None:
        """Forget the requests of the step ahead: all have left. `settle` waits for it all the same."""
        if self._ahead is not None:
            self._ahead = self._ahead._replace(decodes=Decodes([], np.empty(0, np.int64)), rows=[])

    def drop(self) -> Collection[Request]:
        """Forget the step ahead, after an error; return its requests, which have room for it."""
        launched, self._ahead = self._ahead, None
        if launched is None:
            return ()
        self._wait_for_nothing(launched)
        return set(launched.decodes.requests)

    def _can_run_ahead(self, launched: _Launched) -> bool:
        scheduler, decodes = self._scheduler, launched.decodes
        if not self._runs_ahead or launched.tokens is None or launched.rows is not None or decodes.has_last:
            return False
        return len(decodes) == len(scheduler.running) and not self._can_admit()

    def _can_admit(self) -> bool:
        """Return whether `schedule` would look at a waiting request, because there is a place for the next one."""
        scheduler = self._scheduler
        num_more = 1 + scheduler.waiting[0].num_forks_due if scheduler.waiting else 0
        return 0 < num_more <= scheduler.max_num_seqs - len(scheduler.running) or scheduler.has_urgent

    def _launch_ahead(self, before: _Launched) -> _Launched | None:
        """Begin the step after the one that was begun; None if blocks are short. Its error is kept for its turn."""
        assert before.tokens is not None, "there is no step after one that could not be begun"
        if not self._take_room(before.decodes):
            return None
        self.num_ahead += 1
        try:
            return self._launch(before.decodes, before.tokens, 1)
        except Exception as error:
            return _Launched(before.decodes, self._scheduler.num_left, error=error)

    def _take_room(self, decodes: Decodes) -> bool:
        """Make room for the tokens that the step under way will give; False if blocks are short.

        Windows are asked first: room in the full layers cannot be given back while the step under way writes there.
        """
        manager, ends = self._scheduler.manager, (decodes.ends + 1).tolist()
        try:
            manager.windows.check_open(decodes.seq_ids, ends)
            manager.rows.append(decodes.rows)
        except OutOfBlocks:
            return False
        manager.windows.open(decodes.seq_ids, ends)
        add_room(decodes.requests)
        return True

    def _launch(self, decodes: Decodes, token_ids: npt.NDArray[np.int32] | torch.Tensor, num_ahead: int) -> _Launched:
        tokens = self._batch_runner.decode(decodes, token_ids, decodes.chooser(num_ahead))
        return _Launched(decodes, self._scheduler.num_left, tokens, self._fetch(tokens))

    @staticmethod
    def _wait_for_nothing(launched: _Launched) -> None:
        """Wait for a step whose tokens nobody needs. An error of the device is raised by whoever uses it next."""
        if launched.fetch is not None:
            with contextlib.suppress(RuntimeError):
                launched.fetch.wait()
