"""DecodeGraphs: decode steps captured for some numbers of rows, each replayed for batches that fit.

    captured    1   2   4   8   16   24   32         the largest first, all in the same memory
    a batch of 5 ─────► 8 rows, 3 of them padding ─► tokens, logits

    step        schedule ─► one upload ─► replay: embed, layers, logits, likeliest tokens ─► fetch

A batch that no capture serves runs as without captures. The first time for each reason, the log says why.
"""

import logging
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from kvpage.serving.config import EngineConfig
from kvpage.serving.loop.graphs.capture import CannotCapture, Capturer, Replay, is_out_of_memory
from kvpage.serving.loop.graphs.decode_inputs import DecodeInputs
from kvpage.serving.loop.graphs.fixed_model import FixedModel, why_not_fixed
from kvpage.serving.loop.graphs.static_inputs import StaticInputs
from kvpage.serving.loop.graphs.static_step import StaticStep
from kvpage.serving.loop.ranks.rank_caches import RankCaches
from kvpage.serving.model.runner import ModelRunner

logger = logging.getLogger(__name__)


def default_sizes(max_num_seqs: int) -> list[int]:
    """Return powers of two, from 16 on also those between them, up to max_num_seqs, and that itself.

    At most half of a step's rows are padding, from 16 on a third.
    """
    sizes, size = {max_num_seqs}, 1
    while size < max_num_seqs:
        sizes.add(size)
        if size >= 16 and 3 * size // 2 < max_num_seqs:
            sizes.add(3 * size // 2)
        size *= 2
    return sorted(sizes)


class Replayed(NamedTuple):
    """The result of a replay, on the device. The next replay overwrites it.

    logits: [num_seqs, vocab_size]. tokens: the likeliest, int64 [num_seqs]; -1 for logits that are no numbers.
    """

    logits: torch.Tensor
    tokens: torch.Tensor


@dataclass(frozen=True, slots=True)
class GraphStats:
    """Captured decode steps of an engine.

    Attributes:
        sizes: The numbers of sequences that are captured, ascending.
        num_bytes: Device memory that the captures keep.
        num_replays: Steps that were replayed.
        misses: Steps that were not, by the reason.
    """

    sizes: tuple[int, ...]
    num_bytes: int
    num_replays: int
    misses: dict[str, int]


class _TooLarge(Exception):
    """A capture keeps more memory than captures may."""


class _Captured(NamedTuple):
    """A step and its capture."""

    replay: Replay
    step: StaticStep


def captures_decodes(config: EngineConfig) -> bool:
    """Return whether decode steps are captured, where the model allows it."""
    return not config.enforce_eager and config.tensor_parallel_size == 1


def graphs_of(
    runner: ModelRunner, caches: RankCaches, capturer: Capturer, config: EngineConfig, max_seq_len: int
) -> "DecodeGraphs":
    """Return the graphs that a config asks for. max_seq_len: see DecodeGraphs."""
    sizes = config.cudagraph_capture_sizes or default_sizes(config.max_num_seqs)
    block_size = config.cache_config.block_size
    return DecodeGraphs(runner, caches, capturer, sizes, max_seq_len, block_size, config.cudagraph_max_bytes)


class DecodeGraphs:
    """The captured decode steps of one model over its caches.

    sizes: numbers of rows to capture. max_seq_len: tokens of a sequence at most. block_size: of the caches.
    max_bytes: device memory that all captures together keep.
    num_replays, misses: steps that were replayed so far, and reasons of those that were not.
    """

    def __init__(
        self,
        runner: ModelRunner,
        caches: RankCaches,
        capturer: Capturer,
        sizes: Sequence[int],
        max_seq_len: int,
        block_size: int,
        max_bytes: int,
    ) -> None:
        self._runner, self._caches, self._capturer = runner, caches, capturer
        self._sizes, self._max_bytes = sorted(set(sizes)), max_bytes
        self._max_seq_len = max_seq_len
        self._num_blocks = -(-max_seq_len // block_size) if caches.have_blocks else 0
        self._inputs: StaticInputs | None = None
        self._captured: dict[int, _Captured] = {}
        self._fitting: list[int] = []  # the sizes that are captured, ascending
        self._model: FixedModel | None = None
        self._why_none = "Engine.warmup() was not called"
        self.num_replays, self.misses = 0, Counter[str]()

    @property
    def num_captures(self) -> int:
        """How many sizes `capture` tries."""
        return len(self._sizes)

    def stats(self) -> GraphStats:
        """Return the numbers so far."""
        return GraphStats(tuple(self._fitting), self.num_bytes, self.num_replays, dict(self.misses))

    @property
    def num_bytes(self) -> int:
        """Device memory that the captures and their inputs keep."""
        inputs = 0 if self._inputs is None else self._inputs.num_bytes
        return inputs + sum(captured.replay.num_bytes for captured in self._captured.values())

    # --- capturing ---------------------------------------------------------------------------------------------------

    def capture(self, progress: Callable[[int], object] = lambda num: None) -> None:
        """Capture all sizes anew, as far as memory goes. If something raises, nothing is captured.

        progress: called with 1 after each size. Only interrupts are raised; of other errors the log tells.
        """
        self.forget("the capture was interrupted")
        reason = why_not_fixed(self._runner.model)
        if reason is not None:
            self._refuse(reason)
            return
        try:
            self._inputs = inputs = self._make_inputs()
            for size in reversed(self._sizes):
                reason = self._why_not_captured(inputs, size)
                if reason is not None:
                    self._leave_out(size, reason)
                progress(1)
            self._fitting = sorted(self._captured)
            self._model = FixedModel(self._runner, self._caches.tensors)
        except Exception as error:
            self._refuse(str(error) if isinstance(error, CannotCapture) else f"{type(error).__name__}: {error}")
        except BaseException:
            self.forget("the capture was interrupted")
            raise

    def _make_inputs(self) -> StaticInputs:
        caches = self._caches
        return StaticInputs(
            self._sizes[-1],
            self._num_blocks,
            caches.full.device,
            0 if caches.library is None else 1,  # libraries take no empty sequence
            num_groups=1 + len(caches.windows),
            pad_state=caches.pad_state,
            block_size=caches.full.layout.block_size if caches.take_plans else None,
        )

    def forget(self, why: str) -> None:
        """Let go of all captures, and of their memory. why: the reason that later steps give."""
        self._captured, self._fitting = {}, []
        self._inputs, self._model, self._why_none = None, None, why

    def _refuse(self, reason: str) -> None:
        self.forget(reason)
        logger.warning("decode steps are not captured as graphs, because %s", reason)

    def _why_not_captured(self, inputs: StaticInputs, size: int) -> str | None:
        """Capture a step of `size` rows; return why it cannot be. Another size may take less memory."""
        try:
            self._capture(inputs, size)
        except _TooLarge as error:
            return str(error)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            return f"the device's memory does not suffice ({error})"
        return None

    def _leave_out(self, size: int, reason: str) -> None:
        self._capturer.release_memory()  # once the error, and what its frames have held, are gone
        self._why_none = reason
        logger.warning("decode steps of %d rows are not captured, because %s", size, reason)

    def _capture(self, inputs: StaticInputs, size: int) -> None:
        """Capture a step of `size` rows, all of them padding."""
        inputs.clear()
        step = StaticStep(self._runner, self._caches, inputs, size, self._max_seq_len)
        others = [*self._captured.values()]
        replay = self._capturer.capture(step.compute, others[-1].replay if others else None)
        if self.num_bytes + replay.num_bytes > self._max_bytes:
            raise _TooLarge("cudagraph_max_bytes is too small")
        self._captured[size] = _Captured(replay, step)

    # --- replaying ---------------------------------------------------------------------------------------------------

    def run(self, inputs: DecodeInputs, token_ids: npt.NDArray[np.int32] | torch.Tensor) -> Replayed | None:
        """Replay a step that computes the last token of each sequence; None if it must run without a capture.

        token_ids: of each sequence; a tensor for those that are still on the device, int64.
        """
        reason = self._why_not(inputs)
        if reason is not None:
            self.miss(reason)
            return None
        num_seqs = inputs.num_seqs
        replay, step = self._captured[self._fitting[bisect_left(self._fitting, num_seqs)]]
        assert self._inputs is not None, "there is a capture"
        if isinstance(token_ids, torch.Tensor):
            self._inputs.keep_newest(token_ids)
        self._inputs.fill(step.num_rows, inputs, None if isinstance(token_ids, torch.Tensor) else token_ids)
        step.renew_plan(inputs.full.seq_lens.tolist())
        replay.replay()
        self.num_replays += 1
        return Replayed(step.logits[:num_seqs], self._inputs.newest_tokens[:num_seqs])

    def miss(self, reason: str) -> None:
        """Count a step that no capture serves; tell of it if it is the first one for this reason."""
        if reason not in self.misses:
            logger.info("a decode step runs without a captured graph, because %s", reason)
        self.misses[reason] += 1

    def _why_not(self, inputs: DecodeInputs) -> str | None:
        if not self._fitting or self._model is None:
            return self._why_none
        if inputs.num_seqs > self._fitting[-1]:
            return f"it has more than {self._fitting[-1]} sequences"
        if 0 < self._num_blocks < inputs.full.block_tables.shape[1]:
            return f"a sequence has more than {self._num_blocks} blocks"
        if (reason := self._model.why_never()) is not None:
            self.forget(f"{reason} since Engine.warmup()")
            return self._why_none
        return self._model.why_not_now()
