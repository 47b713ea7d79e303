"""CachedRows against lists of tokens. K and V of a token are made from all tokens up to it, and blocks hold NaN where
nothing was written: a block that is shared wrongly, lost or overwritten shows in what is read.
"""

import random
from itertools import count
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support.seeds import seed_of

from kvpage import BlockManager, CacheConfig, CacheEngine, ModelConfig, OutOfBlocks, ops
from kvpage.serving.generate.cached_rows import CachedRows, RowSlots

B = 4
MODEL = ModelConfig(head_size=8, num_kv_heads=2, layer_types=("full_attention",) * 2, dtype=torch.float32)


def content(tokens: list[int], layer: int) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of each token, [num_tokens, 2, 8]: exact numbers that tell the tokens before it, and the layer."""
    states, state = [], layer + 1
    for token in tokens:
        state = (state * 31 + token + 1) % 100003
        states.append(state)
    key = torch.tensor(states, dtype=torch.float32)[:, None, None] + torch.arange(16).view(1, 2, 8) * 2**-5
    return key, -key


class Model:
    """Writes and reads as the layers of a model do."""

    def __init__(self, num_blocks: int, num_host_blocks: int = 0, **layout: str) -> None:
        config = CacheConfig(block_size=B, num_gpu_blocks=num_blocks, num_cpu_blocks=num_host_blocks, **layout)
        self.engine = CacheEngine(config, MODEL)
        for cache in (*self.engine.gpu_cache, *self.engine.cpu_cache):
            cache.fill_(float("nan"))
        self.manager = BlockManager(num_blocks, B, num_host_blocks=num_host_blocks)
        self.seq_ids = count()

    def open(self, prompts: list[list[int]], findable: bool = True, namespace: bytes = b"") -> CachedRows:
        rows = CachedRows(self.manager, self.engine, self.seq_ids)
        rows.open(np.array(prompts, np.int32), [findable] * len(prompts), namespace)
        rows.skip_found()
        return rows

    def compute(self, rows: CachedRows, before: list[list[int]], new: list[list[int]]) -> None:
        """One step: each row's tokens so far, and its next ones."""
        tokens = np.array(new, np.int32)
        rows.check(tokens, len(before[0]))
        slots = rows.begin(tokens, len(before[0]))
        for layer, cache in enumerate(self.engine.gpu_cache):
            parts = [content(old + more, layer) for old, more in zip(before, new, strict=True)]
            key, value = (torch.cat([part[i][len(before[0]) :] for part in parts]) for i in (0, 1))
            ops.reshape_and_cache(key, value, cache, slots.slot_mapping, self.engine.layout)
        self.check(slots, [old + more for old, more in zip(before, new, strict=True)])
        rows.finish(tokens, len(before[0]))

    def check(self, slots: RowSlots, tokens: list[list[int]]) -> None:
        for layer, cache in enumerate(self.engine.gpu_cache):
            for table, row in zip(slots.block_tables, tokens, strict=True):
                read = ops.gather_cache(cache, table[None], [len(row)], self.engine.layout)
                for found, expected in zip(read, content(row, layer), strict=True):
                    assert torch.equal(found, expected), (layer, row)


def state(model: Model, rows: CachedRows) -> tuple:
    stats = model.manager.stats()
    kept = [(row.seq_id, row.room, row.num_written) for row in rows._rows]
    return rows.length, rows._tokens.tolist(), kept, stats.num_used_blocks, stats.num_free_blocks


@pytest.mark.parametrize("length", [1, B - 1, B, B + 1, 3 * B, 3 * B + 2])
def test_finds_what_was_computed_up_to_the_last_token(length: int) -> None:
    model, prompt = Model(16), list(range(length))
    rows = model.open([prompt])
    assert (rows.length, rows.num_found, len(rows)) == (0, 0, 1)
    model.compute(rows, [[]], [prompt])
    rows.release()
    assert len(rows) == 0
    again = model.open([prompt])
    # Of the last block, too, what is found is all but the last token: by a copy of a part.
    assert again.length == (length - 1 if length % B == 0 else length // B * B)
    model.compute(again, [prompt[: again.length]], [prompt[again.length :]])
    again.release()
    model.manager.check()
    assert model.manager.stats().num_used_blocks == 0


def test_a_row_that_has_found_more_writes_nothing_into_what_it_has_found() -> None:
    model, prompt = Model(32), list(range(3 * B))
    rows = model.open([prompt])
    model.compute(rows, [[]], [prompt])
    rows.release()
    other = [prompt[0]] + [50] * (3 * B)
    both = model.open([prompt + [99], other])
    assert (both.length, both.num_found) == (1, 1)  # the other has the first token by a copy
    slots = both.begin(np.array([prompt[1:] + [99], other[1:]], np.int32), 1).slot_mapping.view(2, -1)
    assert slots[0, :-1].tolist() == [-1] * (3 * B - 1)
    owned = [*slots[0, -1:].tolist(), *slots[1].tolist()]
    cached = model.manager.tree.match(np.arange(3 * B + 1, dtype=np.int32))
    assert min(owned) >= 0 and not {slot // B for slot in owned} & set(cached.block_ids.tolist())
    model.manager.tree.release(cached)
    model.compute(both, [[0], [0]], [prompt[1:] + [99], other[1:]])


def test_private_rows_neither_find_nor_are_found() -> None:
    model, prompt = Model(32), list(range(2 * B))
    rows = model.open([prompt])
    model.compute(rows, [[]], [prompt])
    rows.release()
    num_cached = model.manager.tree.num_cached
    private = model.open([prompt + [7] * B], findable=False)
    assert private.length == 0 and not private.is_findable(0)
    model.compute(private, [[]], [prompt + [7] * B])
    private.select([0, 0, 0])
    model.compute(private, [prompt + [7] * B] * 3, [[token] * (B + 1) for token in range(3)])
    private.release()
    assert model.manager.tree.num_cached == num_cached
    assert model.open([prompt + [7] * B]).length == 2 * B
    model.manager.check()


def test_hide_gives_up_what_was_found() -> None:
    model, prompt = Model(32), list(range(2 * B + 1))
    rows = model.open([prompt])
    model.compute(rows, [[]], [prompt])
    rows.release()
    rows = CachedRows(model.manager, model.engine, model.seq_ids)
    rows.open(np.array([prompt, prompt], np.int32), [True, True], b"")
    rows.hide([1])
    assert [rows.is_findable(row) for row in (0, 1)] == [True, False]
    assert rows.num_found == 0
    model.compute(rows, [[], []], [prompt, prompt])
    rows.release()
    model.manager.check()


@pytest.mark.parametrize("findable", [True, False])
@pytest.mark.parametrize("length", [0, 1, B - 1, B, B + 1, 2 * B, 2 * B + 3, 3 * B])
def test_crop_then_other_tokens(length: int, findable: bool) -> None:
    model, prompt = Model(32), list(range(2 * B + 3))
    rows = model.open([prompt], findable)
    model.compute(rows, [[]], [prompt])
    tokens = prompt + list(range(100, 100 + B))
    model.compute(rows, [prompt], [tokens[len(prompt) :]])
    rows.crop(min(length, rows.length))
    assert rows.length == length
    other = [200, 201]
    model.compute(rows, [tokens[:length]], [other])
    rows.release()
    model.manager.check()
    assert model.manager.stats().num_used_blocks == 0
    assert (model.manager.tree.num_cached > 0) == findable
    if findable:  # the whole blocks committed before the crop, or those after it
        assert model.open([tokens]).length == max(2 * B, min(length, (length + 2) // B * B))


def test_crop_of_the_last_step_takes_no_block() -> None:
    model, prompt = Model(3), list(range(2 * B))
    rows = model.open([prompt])
    model.compute(rows, [[]], [prompt])
    model.compute(rows, [prompt], [[1, 2, 3]])
    assert not model.manager.has_room(1)
    rows.crop(2 * B + 1)
    model.compute(rows, [prompt + [1]], [[9]])
    rows.release()
    model.manager.check()


def test_selected_rows_share_all_their_blocks() -> None:
    model, prompt = Model(7), list(range(3 * B - 1))
    rows = model.open([prompt])
    model.compute(rows, [[]], [prompt])
    assert model.manager.num_free_blocks == 4
    rows.select([0] * 5)
    assert model.manager.num_free_blocks == 4
    model.compute(rows, [prompt] * 5, [[token] for token in range(5)])  # four of them copy the last block
    assert model.manager.num_free_blocks == 0
    rows.release()
    model.manager.check()


def test_select_without_room_changes_nothing() -> None:
    model, prompt = Model(4), list(range(2 * B))
    rows = model.open([prompt])
    model.compute(rows, [[]], [prompt])
    model.compute(rows, [prompt], [[1, 2]])
    rows.crop(2 * B + 1)  # leaves room behind it, so that a second row takes a block of its own
    rows.commit()
    before = state(model, rows)
    with pytest.raises(OutOfBlocks):
        rows.select([0, 0, 0])
    assert state(model, rows) == before
    model.manager.check()
    model.compute(rows, [prompt + [1]], [[5]])


def test_crop_without_room_changes_nothing() -> None:
    model, prompt = Model(2), list(range(2 * B))
    rows = model.open([prompt])
    model.compute(rows, [[]], [prompt])
    rows.commit()
    before = state(model, rows)
    with pytest.raises(OutOfBlocks):
        rows.crop(B + 1)
    assert state(model, rows) == before
    model.manager.check()


def test_open_and_begin_without_room_change_nothing() -> None:
    model, prompt = Model(4), list(range(2 * B))
    rows = CachedRows(model.manager, model.engine, model.seq_ids)
    with pytest.raises(OutOfBlocks):
        rows.open(np.array([prompt, prompt, prompt], np.int32), [True, True, True], b"")
    assert (len(rows), model.manager.num_free_blocks) == (0, 4)
    rows = model.open([prompt, [50] * 2 * B])
    model.compute(rows, [[], []], [prompt, [50] * 2 * B])
    rows.commit()
    before = state(model, rows)
    with pytest.raises(OutOfBlocks):
        rows.begin(np.array([[1], [2]], np.int32), 2 * B)
    assert state(model, rows) == before


def test_errors() -> None:
    model = Model(8)
    rows = model.open([[1, 2, 3], [1, 2, 4]])
    model.compute(rows, [[], []], [[1, 2], [1, 2]])
    before = state(model, rows)
    for wrong in ([[4], [4]], [[3], [3]], [[3, 0], [5, 0]]):
        with pytest.raises(ValueError, match="input_ids must be those that the cache was made with"):
            rows.check(np.array(wrong, np.int32), 2)
    rows.check(np.array([[3], [3], [4], [4]], np.int32), 2, 2)
    for length in (-1, 3):
        with pytest.raises(ValueError, match=r"length must be in \[0, 2\]"):
            rows.crop(length)
    for indices in ([], [2], [-1]):
        with pytest.raises(ValueError, match=r"indices must be rows in \[0, 2\)"):
            rows.select(indices)
    assert state(model, rows) == before


LAYOUTS = [
    {"backend": backend, "kv_layout": kv_layout, "layer_layout": layer_layout}
    for backend, kv_layout in (("flash", "NHD"), ("flash", "HND"), ("flashinfer", "HND"), ("paged", "NHD"))
    for layer_layout in ("separate", "packed")
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: "-".join(layout.values()))
@pytest.mark.parametrize("num_host_blocks", [0, 12])
def test_random_batches(layout: dict[str, str], num_host_blocks: int) -> None:
    """Several batches at once over few blocks, which also are evicted and come back from the host."""
    choose = random.Random(seed_of(num_host_blocks))
    model = Model(40, num_host_blocks, **layout)
    batches: list[SimpleNamespace] = []
    counts = dict.fromkeys(("found", "crop", "select", "lacking"), 0)
    for _ in range(150):
        try:
            _random_step(choose, model, batches, counts)
        except OutOfBlocks:
            counts["lacking"] += 1
            if batches:
                batches.pop(choose.randrange(len(batches))).rows.release()
        model.manager.check()
        for batch in batches:
            assert batch.rows.length == len(batch.tokens[0])
    for batch in batches:
        batch.rows.release()
    model.manager.check()
    assert model.manager.stats().num_used_blocks == 0
    assert min(counts["found"], counts["crop"], counts["select"]) > 0, counts


def _random_step(choose: random.Random, model: Model, batches: list[SimpleNamespace], counts: dict[str, int]) -> None:
    if not batches or (len(batches) < 3 and choose.random() < 0.3):
        # Few different tokens, so that prompts share beginnings of any length.
        width = choose.randint(1, 4 * B)
        start = [0] * choose.randint(0, width)
        prompts = [
            (start + [choose.randrange(2) for _ in range(width)])[:width] for _ in range(choose.choice([1, 1, 2, 3]))
        ]
        rows = model.open(prompts, findable=choose.random() < 0.8)
        counts["found"] += rows.length
        batches.append(SimpleNamespace(rows=rows, prompts=prompts, tokens=[row[: rows.length] for row in prompts]))
        return
    batch = choose.choice(batches)
    rows, length = batch.rows, batch.rows.length
    planned = len(batch.prompts[0]) - length
    action = choose.random()
    if action < 0.6:
        num_new = choose.randint(1, planned if planned > 0 else B + 1)
        new = [row[length : length + num_new] for row in batch.prompts]
        if planned <= 0:
            new = [[choose.randrange(2) for _ in range(num_new)] for _ in batch.prompts]
        model.compute(rows, batch.tokens, new)
        batch.tokens = [old + more for old, more in zip(batch.tokens, new, strict=True)]
        if planned <= 0:
            batch.prompts = batch.tokens
    elif action < 0.75:
        length = choose.randint(0, length)
        rows.crop(length)
        if length < len(batch.tokens[0]):
            counts["crop"] += 1
            batch.prompts = batch.tokens = [row[:length] for row in batch.tokens]
    elif action < 0.9:
        indices = [choose.randrange(len(rows)) for _ in range(choose.randint(1, 3))]
        rows.select(indices)
        counts["select"] += 1
        batch.tokens = [batch.tokens[index] for index in indices]
        batch.prompts = [batch.prompts[index] for index in indices]
    else:
        batches.remove(batch)
        rows.release()
