"""Transfer: one asynchronous swap, and TransferQueue: the swaps of one engine, in order.

    swap_out(pairs, non_blocking=True)
       │  check the pairs, pin the blocks of both pools                  a failure up to here raises and changes nothing
       ▼
    in flight ── the stream copies, layer by layer or all at once ──►    `wait` raises a failure from here on
       │
       ▼  a call finds that the event has passed: wait(), is_done(), or the engine's next call
    settled: the pins are given back and on_done is called, once

From the pins to the settling, the tensors of both ends are kept alive.
"""

import os
import threading
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from functools import partial

import torch

from kvpage._C import BlockPool
from kvpage.cache.transfer_stream import TransferEvent, TransferStream
from kvpage.checks.close_later import close_later

OnDone = Callable[["Transfer"], None]
Pools = tuple["BlockPool | None", "BlockPool | None"]


class BlockPins:
    """One more reference to every block that a mapping reads and writes, until `release`.

    pools: Of the sources and of the destinations; None where the caller keeps the blocks itself. It raises as
    `BlockPool.share` does (ValueError for blocks that are free or cached by a tree), and then holds nothing.
    """

    def __init__(self, pools: Pools, block_mapping: torch.Tensor) -> None:
        with ExitStack() as pins:
            for pool, column in zip(pools, block_mapping.unbind(1), strict=True):
                if pool is not None:
                    ids = column.contiguous()
                    pool.share(ids)
                    pins.callback(pool.release, ids)
            self._held = pins.pop_all()

    def release(self) -> None:
        """Give all references back. A second call does nothing."""
        self._held.close()


class Transfer:
    """An asynchronous swap, which `CacheEngine.swap_in` and `swap_out` return with non_blocking=True.

    While it is in flight, the source blocks must not be written and the destination blocks not be used. Its pins keep
    the pools from handing them out. Any thread may call its methods, but not while another thread captures a graph:
    CUDA forbids it. A transfer that failed leaves its destination blocks undefined. If the caller drops the handle, the
    engine finishes the transfer. An error that no call has raised becomes a RuntimeWarning then.

    Args:
        num_bytes: Bytes of the blocks in all layers.
        pins: References to the blocks, which the transfer gives back.
        on_done: Called once with the transfer when the pins are given back, also if it failed; None for nothing.

    Attributes:
        num_bytes: Bytes of the blocks in all layers.
    """

    def __init__(self, num_bytes: int, pins: BlockPins, on_done: OnDone | None = None) -> None:
        self.num_bytes = num_bytes
        self._pins, self._on_done = pins, on_done
        self._lock = threading.RLock()  # one thread settles; its on_done may ask the transfer again
        self._settled = self._error_seen = False
        self._error: Exception | None = None
        self._seconds: float | None = None
        self._steps: Sequence[Callable[[], None]] = ()  # they hold the tensors of both ends
        self._begin: TransferEvent | None = None
        self._end: TransferEvent | None = None
        self._layers: list[TransferEvent] | None = None

    def wait(self) -> None:
        """Wait until the blocks are copied, and give the pins back.

        Raises:
            Exception: The error of the copy, or of on_done.
        """
        self._wait_quietly()
        self._raise_error()

    def wait_stream(self, stream: torch.cuda.Stream | None = None) -> None:
        """Order a stream's further work after the copy. The host waits only on a CPU device.

        Args:
            stream: The stream; None for the current one.

        Raises:
            ValueError: The stream captures a graph.
            Exception: The transfer's error, as far as it is known by then.
        """
        self._event().wait_stream(stream)
        self._raise_error()

    def is_done(self) -> bool:
        """Return whether the blocks are copied, or the transfer failed. If so, the pins are given back.

        It never raises. It returns False as long as the current stream captures a graph.
        """
        with self._lock:
            if not self._settled and self._has_passed():
                self._settle()
            return self._settled

    def layer_ready(self, layer: int) -> bool:
        """Return whether one layer's blocks are copied.

        Args:
            layer: The layer, counted from 0 in this stage.

        Raises:
            ValueError: The swap was made without by_layer=True, or the layer is out of range.
            Exception: The error of a failed transfer.
        """
        ready = self._layer_event(layer).is_done()
        self._raise_error()
        return ready

    def wait_layer(self, layer: int, stream: torch.cuda.Stream | None = None) -> None:
        """Order a stream's further work after the copy of one layer, so that it computes while the next layers arrive.

        Args:
            layer: The layer, counted from 0 in this stage.
            stream: The stream; None for the current one.

        Raises:
            ValueError: As in `layer_ready` and `wait_stream`.
            Exception: The error of a failed transfer.
        """
        self._layer_event(layer).wait_stream(stream)
        self._raise_error()

    @property
    def seconds(self) -> float | None:
        """Seconds from the stream's arrival at it until it was done; None while unknown, and if it failed."""
        return self._seconds if self.is_done() else None

    @property
    def gigabytes_per_second(self) -> float | None:
        """Rate in 10^9 bytes a second; None where `seconds` is."""
        seconds = self.seconds
        return None if seconds is None else self.num_bytes / max(seconds, 1e-9) / 1e9

    def _start(
        self,
        open_stream: Callable[[], TransferStream],
        steps: Sequence[Callable[[], None]],
        layers_each: Sequence[int] | None,
    ) -> None:
        """Submit the steps, each followed by an event. If the stream refuses, the pins go back and this raises.

        layers_each: The layers that each step copies; None if no layer can be waited for.
        """
        self._steps = steps
        try:
            stream = open_stream()
            stream.wait_current()
            self._begin = self._end = stream.record()
            events = []
            for step in steps:
                stream.submit(partial(self._run, step))
                self._end = stream.record()
                events.append(self._end)
            if layers_each is not None:
                layers = zip(events, layers_each, strict=True)
                self._layers = [event for event, num_layers in layers for _ in range(num_layers)]
        except BaseException:
            self._settled = self._error_seen = True
            self._pins.release()
            raise

    def _run(self, step: Callable[[], None]) -> None:
        if self._settled or self._error is not None:  # refused half-way, or a layer failed: the rest is of no use
            return
        try:
            step()
        except Exception as error:  # raised on the stream's thread: wait() raises it on the caller's
            self._error = error

    def _has_passed(self) -> bool:
        try:
            return self._event().is_done()
        except RuntimeError as error:  # the device has failed, and nothing runs on it any more
            self._error = self._error or error
            return True

    def _wait_quietly(self) -> None:
        if not self.is_done():
            try:
                self._event().wait()
            except RuntimeError as error:
                self._error = self._error or error
            with self._lock:
                if not self._settled:
                    self._settle()

    def _settle(self) -> None:
        self._settled = True
        try:
            self._pins.release()
            if self._error is None:
                self._seconds = self._event().seconds_since(self._begin)
            if self._on_done is not None:
                self._on_done(self)
        except Exception as error:  # wait() raises it
            self._error = self._error or error
        self._on_done, self._steps = None, ()  # their objects may go

    def _raise_error(self) -> None:
        if self._error is not None:
            self._error_seen = True
            raise self._error

    def _event(self) -> TransferEvent:
        assert self._end is not None  # _start sets it before any other call
        return self._end

    def _layer_event(self, layer: int) -> TransferEvent:
        if self._layers is None:
            raise ValueError("a layer can be waited for only in a swap made with by_layer=True")
        if not 0 <= layer < len(self._layers):
            raise ValueError(f"layer must be in [0, {len(self._layers)}), got {layer}")
        return self._layers[layer]

    def __del__(self) -> None:
        if self._error is not None and not self._error_seen:
            warnings.warn(
                f"a transfer failed, and no call has raised its error: {self._error!r}", RuntimeWarning, stacklevel=1
            )


class TransferQueue:
    """The transfers in flight of one engine. It holds them until they are settled, even if their handles are dropped.

    The stream is made for the first transfer. A forked child forgets the transfers of its parent, with their pins: the
    parent finishes them.
    """

    def __init__(self, make_stream: Callable[[], TransferStream]) -> None:
        self._make_stream = make_stream
        self._stream: TransferStream | None = None
        self._lock = threading.Lock()  # one stream, however many threads
        self._in_flight: dict[Transfer, None] = {}  # in order
        self._pid = os.getpid()

    def start(
        self, transfer: Transfer, steps: Sequence[Callable[[], None]], layers_each: Sequence[int] | None = None
    ) -> Transfer:
        """Have the steps done one after the other, after all earlier transfers and the caller's current stream.

        layers_each: The layers that each step copies, to be waited for by layer; None if they are not.
        """
        transfer._start(self._open, steps, layers_each)
        self._in_flight[transfer] = None
        return transfer

    def _open(self) -> TransferStream:
        with self._lock:
            if self._stream is None:
                self._stream = self._make_stream()
            return self._stream

    def poll(self) -> int:
        """Settle the transfers that are done, and return how many are in flight still."""
        if self._pid != os.getpid():
            self._in_flight, self._pid = {}, os.getpid()
        for transfer in tuple(self._in_flight):
            if transfer.is_done():
                self._in_flight.pop(transfer, None)
        return len(self._in_flight)

    def order_current(self) -> None:
        """Order the further work of the caller's current stream after all transfers in flight."""
        if self.poll():
            for transfer in tuple(self._in_flight):
                transfer._event().wait_stream(None)

    def close(self) -> None:
        """Wait for all transfers, settle them and end the stream."""
        self.poll()
        if self._stream is not None:
            stream, self._stream = self._stream, None
            in_flight, self._in_flight = self._in_flight, {}
            stream.close(partial(_settle_all, in_flight))

    def abandon(self) -> None:
        """Close soon, on another thread: for the garbage collector, in which no call may wait.

        Without transfers in flight there is nothing to wait for, and the stream ends when it is forgotten.
        """
        if self._in_flight:
            close_later(self.close)
        else:
            self._stream = None


def _settle_all(transfers: Iterable[Transfer]) -> None:
    for transfer in transfers:
        transfer._wait_quietly()
