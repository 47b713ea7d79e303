"""Moves beside the computation: every layer finds its blocks, whatever the streams do, and whatever move fails."""

import random

import numpy as np
import pytest
from fake_device import FakeDevice, FakeStream, OpaqueBackend

from kvpage import CacheConfig, CacheEngine, ModelConfig
from kvpage.blocks.moves import BlockMoves
from kvpage.cache import layered_moves
from kvpage.cache.layered_moves import layer_pieces
from kvpage.serving.loop.moves.block_transfers import BlockTransfers

NUM_BLOCKS, NUM_HOST_BLOCKS = 6, 5


@pytest.mark.parametrize("num_layers", [1, 2, 7, 8, 9, 28, 32, 80])
@pytest.mark.parametrize("layer_bytes", [0, 1, 1 << 20, 3 << 20, 4 << 20, 1 << 30])
def test_pieces_cover_the_layers(num_layers: int, layer_bytes: int) -> None:
    pieces = layer_pieces(num_layers, layer_bytes)
    assert [layer for first, last in pieces for layer in range(first, last)] == list(range(num_layers))
    sizes = [last - first for first, last in pieces]
    assert all(size * layer_bytes >= 4 << 20 for size in sizes[:-1]) and len(pieces) <= 12
    if layer_bytes >= 4 << 20:
        assert sizes[0] == 1, "the computation waits for more than the first layer"


class Manager:
    """A block manager, as far as BlockTransfers uses it: moves that are due."""

    def __init__(self) -> None:
        self.moves, self.space = BlockMoves(), self

    @property
    def has_moves(self) -> bool:
        return bool(self.moves)

    def take_moves(self) -> BlockMoves:
        moves, self.moves = self.moves, BlockMoves()
        return moves


class Model:
    """A loop over a device that is played, and what its blocks must hold.

    The content of each tier is [layer][block, elements]; `device` and `host` are as they must be once the streams have
    done all that they were told.
    """

    def __init__(self, seed: int, num_layers: int, waits: bool = True) -> None:
        self.rng, self.played, self.waits = random.Random(seed), FakeDevice(seed, is_host=False), waits
        config = CacheConfig(4, NUM_BLOCKS, NUM_HOST_BLOCKS, backend="opaque handles", cache_dtype="fp32")
        shape = ModelConfig(8, 2, ("full_attention",) * num_layers)
        self.engine = CacheEngine(config, shape, make_stream=lambda device: FakeStream(self.played))
        self.real = [
            OpaqueBackend.adopt(self.played, is_on_device, caches)
            for is_on_device, caches in ((True, self.engine.gpu_cache), (False, self.engine.cpu_cache))
        ]
        self.number = 0
        for tier in self.real:
            for layer in tier:
                layer[:] = self.new_rows(len(layer))
        self.device, self.host = ([layer.copy() for layer in tier] for tier in self.real)
        self.manager = Manager()
        self.transfers = BlockTransfers(self.engine, self.manager, is_beside=True)

    def new_rows(self, count: int) -> np.ndarray:
        self.number += count
        return np.arange(self.number - count, self.number, dtype=np.float32)[:, None]

    def add_moves(self) -> None:
        """A few moves, and what they make of the blocks."""
        for _ in range(self.rng.randrange(4)):
            kind = self.rng.choice(["swap_out", "swap_in", "copy"])
            count = self.rng.randrange(1, 4)
            if kind == "copy":
                ids = self.rng.sample(range(NUM_BLOCKS), 2)
                pairs = [(ids[0], ids[1])]
            else:
                sizes = (NUM_BLOCKS, NUM_HOST_BLOCKS) if kind == "swap_out" else (NUM_HOST_BLOCKS, NUM_BLOCKS)
                pairs = list(zip(*(self.rng.sample(range(size), count) for size in sizes), strict=True))
            self.manager.moves.add(kind, pairs)
            src = self.host if kind == "swap_in" else self.device
            dst = self.host if kind == "swap_out" else self.device
            for layer in range(len(src)):
                rows = [src[layer][s].copy() for s, _ in pairs]
                for row, (_, d) in zip(rows, pairs, strict=True):
                    dst[layer][d] = row
            if self.rng.random() < 0.2:
                self.played.failing[kind != "swap_in", tuple(pairs)] = self.rng.randrange(len(src))

    def step(self) -> None:
        """One pass: each layer reads all blocks, and writes one. It may end early, as by an error of the model."""
        arrival = self.begin()
        end = self.rng.choice([len(self.device)] * 3 + [self.rng.randrange(len(self.device))])
        for layer in range(end):
            if arrival is not None and self.waits:
                arrival.wait_layer(layer)
            self.compute(layer)
            self.played.idle(self.rng.randrange(6))

    def begin(self):
        if self.rng.random() < 0.3:
            return self.again(self.transfers.run)
        return self.again(self.transfers.start)

    def again(self, call):
        while True:
            try:
                return call()
            except RuntimeError as error:
                assert str(error) == "a copy has failed"

    def compute(self, layer: int) -> None:
        real, expected = self.real[0][layer], self.device[layer].copy()
        written, row = self.rng.randrange(NUM_BLOCKS), self.new_rows(1)[0]
        self.device[layer][written] = row

        def read() -> None:
            np.testing.assert_array_equal(real, expected)

        def write() -> None:
            real[written] = row

        self.played.computation.put([read])
        self.played.computation.put([write])

    def check(self) -> None:
        self.again(self.transfers.run)
        for layer in range(len(self.device)):
            self.compute(layer)
        self.played.run()
        assert self.engine.poll() == 0
        for real, expected in zip(self.real, (self.device, self.host), strict=True):
            for layer, wanted in zip(real, expected, strict=True):
                np.testing.assert_array_equal(layer, wanted)

    def close(self) -> None:
        self.played.run_until(self.played.transfers.point())
        for caches in (self.engine.gpu_cache, self.engine.cpu_cache):
            OpaqueBackend.forget(caches)


def play(seed: int, num_layers: int, waits: bool = True) -> Model:
    model = Model(seed, num_layers, waits)
    try:
        for _ in range(8):
            model.add_moves()
            model.step()
        model.check()
    finally:
        model.played.computation.stop()
        model.close()
    return model


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layered_moves, "MIN_PIECE_BYTES", 1)


@pytest.mark.parametrize("num_layers", [1, 3, 17])
@pytest.mark.usefixtures("small_pieces")
def test_every_layer_finds_its_blocks(num_layers: int) -> None:
    """Also where moves fail, in any layer, and where a step ends before all of its layers have waited."""
    kinds = {"swap_out": 0, "swap_in": 0, "copy": 0}
    for seed in range(12):
        for kind, stats in play(seed, num_layers).transfers.stats().items():
            kinds[kind] += stats.num_blocks
            assert (stats.seconds > 0) == (stats.num_blocks > 0)
    assert min(kinds.values()) > 5


@pytest.mark.usefixtures("small_pieces")
def test_a_layer_that_does_not_wait_is_caught() -> None:
    def is_caught(seed: int) -> bool:
        try:
            play(seed, 3, waits=False)
        except AssertionError:
            return True
        return False

    assert any(is_caught(seed) for seed in range(30))


@pytest.mark.usefixtures("small_pieces")
def test_a_layer_waits_for_its_own_piece_alone() -> None:
    """The first layer computes while the moves of the last are on their way."""
    model = Model(0, 17)
    model.manager.moves.add("swap_in", [(0, 0)])
    arrival = model.transfers.start()
    arrival.wait_layer(0)
    model.played.computation.put([lambda: None])
    point = model.played.computation.point()
    while not point.is_reached():
        lane = model.played.computation if model.played.computation.can_step() else model.played.transfers
        lane.step()
    np.testing.assert_array_equal(model.real[0][0][0], model.host[0][0])
    assert (model.real[0][1][0] != model.host[1][0]).any() and not arrival.is_over
    arrival.wait_layer(1)
    arrival.wait_layer(2)
    assert len([one for one in model.played.computation._line if not isinstance(one, list)]) == 1, "it waited twice"
    arrival.wait()
    assert arrival.is_over
    model.close()
