"""LayerLoad: loads a prompt into blocks layer by layer, so that one layer computes while the next arrives.

    layer 0 of all chunks ─► layer 1 of all chunks ─► ...        in a thread; each verified before it counts
          wait(0)                  wait(1)                       in the caller's

Each layer of a record has a digest of its own, so `wait` reports only bytes exactly as stored. If a chunk turns out to
be corrupt in a later layer, fewer tokens are there from that layer on. The caller throws away computations with more of
them, and commits only the tokens that `result` reports.
"""

import threading

from kvpage.checks.values import as_integer
from kvpage.store.load.block_load import BlockLoad
from kvpage.store.stack.call_gate import CallGate


class LayerLoad:
    """A load that KVStore.load_layers has begun. `close` it, or use it in `with`.

    One thread calls `wait`, `result` and `close`. The load is a call under way, for the gate, until it ends.

    Args:
        load: the wanted chunks, as they are opened here.
        gate: of the store, which closes after the thread has ended.

    Attributes:
        start: the first wanted token.
        num_layers: layers to load.
        num_tokens: the token after the last one that is expected in all layers.

    Raises:
        RuntimeError: no thread can be started; the chunks are closed.
    """

    def __init__(self, load: BlockLoad, gate: CallGate) -> None:
        self.start, self.num_layers = load.start, load.blocks.num_layers
        self._load, self._chunks = load, load.open()
        load.tiers.count_reads([chunk.placed for chunk in self._chunks])
        self.num_tokens = self._end(len(self._chunks))
        self._ends: list[int] = []  # of the layers that have come
        self._error: BaseException | None = None
        self._is_closed = False
        self._changed = threading.Condition()
        self._gate = gate
        self._thread = threading.Thread(target=self._run, name="kvpage-layers", daemon=True)
        self._gate.enter()
        try:
            self._thread.start()
        except BaseException:
            self._end_call()
            raise

    def wait(self, layer: int, timeout: float | None = None) -> int:
        """Return when a `layer`, counted from 0, and all before it are in the blocks; `timeout`: seconds, or None.

        Returns:
            The token after the last one in the blocks: num_tokens, or fewer after a corrupt record; `start` for none.

        Raises:
            TimeoutError: the layer has not come in time.
            ValueError: there is no such layer, or the load is closed.
        """
        if not 0 <= as_integer("layer", layer) < self.num_layers:
            raise ValueError(f"layer must be in [0, {self.num_layers}), got {layer}")
        with self._changed:
            if not self._changed.wait_for(lambda: len(self._ends) > layer or self._is_over, timeout):
                raise TimeoutError(f"layer {layer} has not come within {timeout} s")
            if len(self._ends) > layer:
                return self._ends[layer]
            if self._error is not None:
                raise self._error
            raise ValueError("the load is closed")

    def result(self, timeout: float | None = None) -> int:
        """Return the token after the last one in the blocks, when all layers are there; `timeout` as of `wait`."""
        return self.wait(self.num_layers - 1, timeout)

    def close(self) -> None:
        """Stop after the layer that is coming. The blocks are not written any more. A second call does nothing."""
        with self._changed:
            self._is_closed = True
        self._thread.join()

    def __enter__(self) -> "LayerLoad":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # --- inside, in the thread ---

    @property
    def _is_over(self) -> bool:
        return self._error is not None or self._is_closed

    def _run(self) -> None:
        try:
            num_chunks = len(self._chunks)
            for layer in range(self.num_layers):
                with self._changed:
                    if self._is_closed:
                        return
                num_chunks = self._load.take_layer(layer, self._chunks[:num_chunks])
                with self._changed:
                    self._ends.append(self._end(num_chunks))
                    self._changed.notify_all()
            self._load.tiers.count(hit_tokens=self._ends[-1] - self.start)
        except BaseException as error:  # `wait` raises it
            with self._changed:
                self._error = error
                self._changed.notify_all()
        finally:
            self._end_call()

    def _end_call(self) -> None:
        for chunk in self._chunks:
            chunk.reader.close()
        self._gate.leave()

    def _end(self, num_chunks: int) -> int:
        return self._chunks[num_chunks - 1].end if num_chunks else self.start
