"""A device whose streams are lanes of small steps, and whose memory nobody can reach but through its streams.

    computation   │ scrub 3 │ write 3 │ ──────────── wait ─┐ │ read 5 │       which lane takes the next step: dice
    transfers     │ wait ───┘ 3 ─► host 1, half by half    └─┤                within a copy, which half comes next: dice

The tensors that CacheEngine holds are handles: their own bytes are poison from beginning to end, and the content is
kept elsewhere, by handle. So an operation that touched a "device pointer" on the host would be seen.
"""

import random
from collections import deque
from collections.abc import Callable
from typing import ClassVar

import numpy as np
import torch

from kvpage import register_backend
from kvpage.layout.backends import FlashBackend

Step = Callable[[], None]
POISON = float("nan")


class Lane:
    """One stream: batches of steps in order, the steps of a batch in any order."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._line: deque[list[Step] | Point] = deque()
        self._num_put = self._num_done = 0

    def put(self, batch: "list[Step] | Point") -> None:
        self._line.append(batch)
        self._num_put += 1

    def point(self) -> "Point":
        return Point(self, self._num_put)

    def stop(self) -> None:
        """What was not done yet never will be."""
        self._line.clear()
        self._num_done = self._num_put

    def has_reached(self, at: int) -> bool:
        return self._num_done >= at

    def can_step(self) -> bool:
        return bool(self._line) and (not isinstance(self._line[0], Point) or self._line[0].is_reached())

    def step(self) -> None:
        """One step of the first batch, or past a wait. An error is the batch's end."""
        head = self._line[0]
        steps = [] if isinstance(head, Point) else head
        try:
            if steps:
                steps.pop(self._rng.randrange(len(steps)))()
        except BaseException:
            steps.clear()
            raise
        finally:
            if not steps:
                self._line.popleft()
                self._num_done += 1


class Point:
    """After all that a lane had by then."""

    def __init__(self, lane: Lane, at: int) -> None:
        self._lane, self._at = lane, at

    def is_reached(self) -> bool:
        return self._lane.has_reached(self._at)


class FakeDevice:
    """The computation's lane and the transfers', and the dice.

    is_host: as on a CPU: what computes runs at once, on the caller's thread, and only transfers are late.
    failing: copies that fail, by whether they read the device tier and their pairs: how many layers are done before.
    """

    def __init__(self, seed: int, is_host: bool) -> None:
        self.rng = random.Random(seed)
        self.is_host = is_host
        self.computation, self.transfers = Lane(self.rng), Lane(self.rng)
        self.current: Lane | None = None if is_host else self.computation  # None: at once
        self.failing: dict[tuple[bool, tuple[tuple[int, int], ...]], int] = {}

    def idle(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self._step_any()

    def run_until(self, point: Point) -> None:
        while not point.is_reached():
            assert self._step_any(), "the streams wait for each other"

    def run(self) -> None:
        while self._step_any():
            pass

    def do(self, steps: list[Step]) -> None:
        """On the current stream."""
        if self.current is not None:
            self.current.put(steps)
            return
        self.rng.shuffle(steps)
        for step in steps:
            step()

    def fail_in_turn(self, copy: tuple[bool, tuple[tuple[int, int], ...]]) -> None:
        """RuntimeError if it is this layer's turn."""
        left = self.failing.pop(copy, None)
        if left == 0:
            raise RuntimeError("a copy has failed")
        if left:
            self.failing[copy] = left - 1

    def copy(self, src: np.ndarray, dst: np.ndarray, pairs: list[tuple[int, int]]) -> None:
        """One layer of blocks, in halves."""
        half = src.shape[1] // 2
        self.do(
            [
                lambda s=s, d=d, part=part: np.copyto(dst[d, part], src[s, part])  # type: ignore[misc]
                for s, d in pairs
                for part in (slice(None, half), slice(half, None))
            ]
        )

    def _step_any(self) -> bool:
        able = [lane for lane in (self.computation, self.transfers) if lane.can_step()]
        if able:
            self.rng.choice(able).step()
        return bool(able)


class FakeEvent:
    def __init__(self, device: FakeDevice, point: Point) -> None:
        self._device, self._point = device, point

    def is_done(self) -> bool:
        self._device.idle(self._device.rng.randrange(3))
        return self._point.is_reached()

    def wait(self) -> None:
        self._device.run_until(self._point)

    def wait_stream(self, stream: object) -> None:
        if self._device.is_host:
            self.wait()
        else:
            self._device.computation.put(self._point)

    def seconds_since(self, earlier: "FakeEvent") -> float:
        return 1.0


class FakeStream:
    """The transfers' lane, as TransferStream wants it. On a host work is called when its turn comes, on a device at
    once, and what it enqueues has its turn later."""

    def __init__(self, device: FakeDevice) -> None:
        self._device = device

    def wait_current(self) -> None:
        if not self._device.is_host:
            self._device.transfers.put(self._device.computation.point())

    def submit(self, work: Step) -> None:
        if self._device.is_host:
            self._device.transfers.put([work])
            return
        before, self._device.current = self._device.current, self._device.transfers
        try:
            work()
        finally:
            self._device.current = before

    def record(self) -> FakeEvent:
        return FakeEvent(self._device, self._device.transfers.point())

    def close(self, last: Step) -> None:
        self._device.run_until(self._device.transfers.point())
        last()


class OpaqueBackend(FlashBackend):
    """Tensors are handles; their content is in `contents`, by data_ptr, with the device and whether it is of the device
    tier: [num_blocks, elements of a block]."""

    contents: ClassVar[dict[int, tuple[FakeDevice, bool, np.ndarray]]] = {}

    @classmethod
    def adopt(cls, device: FakeDevice, is_on_device: bool, handles: list[torch.Tensor]) -> list[np.ndarray]:
        made = []
        for handle in handles:
            handle.fill_(POISON)
            num_blocks = handle.shape[cls.block_dim]
            made.append(np.full((num_blocks, handle.numel() // num_blocks), POISON, np.float32))
            cls.contents[handle.data_ptr()] = device, is_on_device, made[-1]
        return made

    @classmethod
    def forget(cls, handles: list[torch.Tensor]) -> None:
        for handle in handles:
            assert handle.isnan().all(), "somebody wrote through a device pointer"
            del cls.contents[handle.data_ptr()]

    @classmethod
    def swap_blocks(cls, src: torch.Tensor, dst: torch.Tensor, block_mapping: torch.Tensor) -> None:
        device, is_on_device, content = cls.contents[src.data_ptr()]
        pairs = [(s, d) for s, d in block_mapping.tolist()]
        device.fail_in_turn((is_on_device, tuple(pairs)))
        device.copy(content, cls.contents[dst.data_ptr()][2], pairs)

    @classmethod
    def copy_blocks(cls, caches: list[torch.Tensor], block_mapping: torch.Tensor) -> None:
        for cache in caches:
            cls.swap_blocks(cache, cache, block_mapping)


register_backend("opaque handles", OpaqueBackend)
