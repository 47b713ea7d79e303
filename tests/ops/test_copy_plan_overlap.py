"""Copy plans beside sets of bytes: which caches may overlap, and what is copied where, in any geometry."""

import random

import pytest
import torch

import kvpage._C as _C

BASE = 1 << 20
ITSELF = "dst must not overlap itself"
SIDES = "src and dst must be the same caches or share no memory"
Side = tuple[list[tuple[int, int]], int]  # each layer's begin and block step, and the number of blocks


def copier_of(src: Side, dst: Side, num_bytes: int):
    """Over addresses that are never read: blocks of so many elements of one byte in each layer."""

    def layers(side: Side) -> list[tuple[int, tuple[int, int]]]:
        return [(BASE + begin, (step, 1)) for begin, step in side[0]]

    return _C.BlockCopier(
        sizes=(1, num_bytes), block_dim=0, element_bytes=1, srcs=layers(src), dsts=layers(dst),
        num_src_blocks=src[1], num_dst_blocks=dst[1], src_device=-1, dst_device=-1, pinned=False,
        kernel_max_bytes=0, max_groups=16,
    )  # fmt: skip


def extents(copier, rows: list[tuple[int, int]]) -> list[tuple[int, int, int]]:
    mapping = torch.tensor(rows, dtype=torch.int64).reshape(-1, 2)
    return [(src - BASE, dst - BASE, size) for src, dst, size in copier.extents(mapping.data_ptr(), len(mapping))]


def copied(copier, rows: list[tuple[int, int]]) -> dict[int, int]:
    """For each byte that is written the one that is read."""
    pairs = [(dst + i, src + i) for src, dst, size in extents(copier, rows) for i in range(size)]
    assert len(dict(pairs)) == len(pairs), "a byte is written twice"
    return dict(pairs)


def copied_naively(src: Side, dst: Side, num_bytes: int, rows: list[tuple[int, int]]) -> dict[int, int]:
    return {
        to + to_step * dst_id + i: begin + step * src_id + i
        for (begin, step), (to, to_step) in zip(src[0], dst[0], strict=True)
        for src_id, dst_id in rows
        for i in range(num_bytes)
    }


def bytes_of(side: Side, num_bytes: int) -> list[int]:
    layers, num_blocks = side
    return [begin + step * block + i for begin, step in layers for block in range(num_blocks) for i in range(num_bytes)]


def refusal(src: Side, dst: Side, num_bytes: int) -> str | None:
    sources, targets = bytes_of(src, num_bytes), bytes_of(dst, num_bytes)
    if len(set(targets)) < len(targets):
        return ITSELF
    return SIDES if src != dst and set(sources) & set(targets) else None


def must_be_accepted(src: Side, dst: Side, num_bytes: int) -> bool:
    """Layers of one step that begin within it, on each side or, where the sides reach into each other, on both."""

    def are_simple(*sides: Side) -> bool:
        layers = [layer for side in sides for layer in side[0]]
        begins, steps = [begin for begin, _ in layers], {step for _, step in layers}
        return len(steps) == 1 and max(begins) - min(begins) < min(steps)

    sources, targets = bytes_of(src, num_bytes), bytes_of(dst, num_bytes)
    meet = sources and targets and min(sources) <= max(targets) and min(targets) <= max(sources)
    if not meet or src == dst:
        return are_simple(dst)
    return are_simple(src, dst) and len(set(sources)) == len(sources)


def outcome(src: Side, dst: Side, num_bytes: int) -> str | None:
    try:
        copier_of(src, dst, num_bytes)
    except ValueError as error:
        return ITSELF if ITSELF in str(error) else SIDES if SIDES in str(error) else str(error)
    return None


def some_side(rng: random.Random, num_layers: int, step: int, begin: int) -> Side:
    """Mostly layers of that step, within one of it."""
    layers = []
    for _ in range(num_layers):
        is_odd = rng.random() < 0.15
        layers.append((begin + rng.randrange(2 * step if is_odd else step), rng.randint(0, 24) if is_odd else step))
    return layers, rng.randint(0, 4)


def some_rows(rng: random.Random, src: Side, dst: Side) -> list[tuple[int, int]]:
    """Within one cache none is read and written."""
    num_rows = rng.randint(0, dst[1]) if src[1] else 0
    dst_ids = rng.sample(range(dst[1]), num_rows)
    src_ids = [block for block in range(src[1]) if src != dst or block not in dst_ids]
    return [(rng.choice(src_ids), dst_id) for dst_id in dst_ids] if src_ids else []


@pytest.mark.parametrize("seed", range(8))
def test_refused_is_what_shares_a_byte(seed):
    """And of what is accepted, every byte goes where a loop over all of them brings it."""
    rng = random.Random(seed)
    seen = dict.fromkeys((None, ITSELF, SIDES), 0)
    for _ in range(400):
        num_layers, num_bytes, step = rng.randint(1, 3), rng.randint(1, 4), rng.randint(1, 20)
        dst = some_side(rng, num_layers, step, 0)
        src = dst if rng.random() < 0.1 else some_side(rng, num_layers, step, rng.choice([-100, 0, 5, 200]))
        said, wanted = outcome(src, dst, num_bytes), refusal(src, dst, num_bytes)
        seen[said] += 1
        if wanted == ITSELF or (wanted is None and must_be_accepted(src, dst, num_bytes)):
            assert said == wanted, (src, dst, num_bytes)
        assert wanted is None or said is not None, (src, dst, num_bytes)
        if said is None:
            rows = some_rows(rng, src, dst)
            got = copied(copier_of(src, dst, num_bytes), rows)
            assert got == copied_naively(src, dst, num_bytes, rows), (src, dst, num_bytes, rows)
    assert all(seen.values())


@pytest.mark.parametrize("num_blocks", [1, 2, 4])
@pytest.mark.parametrize("second", [(8, 16), (4, 8), (7, 8), (8, 24)])
def test_layers_that_reach_into_each_other_with_other_steps(num_blocks, second):
    """Blocks of 8 bytes, dense in the first layer: the second lies on them, or behind the only one."""
    dst = ([(0, 8), second], num_blocks)
    wanted = refusal(([(1000, 8)] * 2, 4), dst, 8)
    assert outcome(([(1000, 8)] * 2, 4), dst, 8) == wanted
    assert (wanted is None) == (num_blocks == 1 and second[0] == 8)


@pytest.mark.parametrize("num_blocks", [0, 1, 4])
def test_neighbours_of_the_first_block_that_overlap_in_later_ones(num_blocks):
    """The source's layers adjoin in every block, the destination's only in the first."""
    src, dst = ([(1000, 16), (1008, 16)], 4), ([(0, 16), (8, 24)], num_blocks)
    assert outcome(src, dst, 8) == refusal(src, dst, 8) == (ITSELF if num_blocks > 1 else None)
    if num_blocks == 1:
        assert copied(copier_of(src, dst, 8), [(3, 0)]) == copied_naively(src, dst, 8, [(3, 0)])


@pytest.mark.parametrize("step", [0, 4, 7])
def test_one_layer_that_overlaps_itself(step):
    assert outcome(([(1000, 8)], 4), ([(0, step)], 2), 8) == ITSELF
    assert outcome(([(1000, 8)], 4), ([(0, step)], 1), 8) is None


@pytest.mark.parametrize("begins", [[0] * 40, [100 * (i % 4) for i in range(40)], [*range(0, 400, 10), 399]])
def test_many_layers_of_which_some_overlap(begins):
    src = ([(10_000 + 1000 * i, 100) for i in range(len(begins))], 4)
    assert outcome(src, ([(begin, 100) for begin in begins], 4), 10) == ITSELF


@pytest.mark.parametrize("begins", [[0, 80, 150], [150, 80, 0], [80, 0, 150]])
def test_layers_that_begin_within_each_other_share_no_byte(begins):
    """The third begins in the second block of the first, and ends before the second layer's."""
    src, dst = ([(10_000 + 1000 * i, 100) for i in range(3)], 3), ([(begin, 100) for begin in begins], 3)
    assert outcome(src, dst, 10) is None
    rows = [(0, 2), (1, 0), (2, 1)]
    assert copied(copier_of(src, dst, 10), rows) == copied_naively(src, dst, 10, rows)


def test_a_short_layer_between_does_not_hide_a_long_one():
    """The source reaches to 910; of the destination one layer ends at 130, the other one lies on the source."""
    src = ([(0, 100), (10_000, 100)], 10)
    assert outcome(src, ([(20, 100), (2000, 100)], 2), 10) is None
    assert outcome(src, ([(20, 100), (200, 100)], 2), 10) == SIDES


@pytest.mark.parametrize("gap", [-1, 0, 1, 100])
@pytest.mark.parametrize("src_first", [True, False])
def test_an_expanded_source_beside_the_destination(gap, src_first):
    """All of its blocks are one: it may touch the destination, and not reach into it."""
    src, dst = ([(0 if src_first else 4 * 8 + gap, 0)], 4), ([(8 + gap if src_first else 0, 8)], 4)
    assert outcome(src, dst, 8) == (SIDES if gap < 0 else None)
    if gap >= 0:
        rows = [(3, 0), (0, 2), (2, 1)]
        assert copied(copier_of(src, dst, 8), rows) == copied_naively(src, dst, 8, rows)


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 1, 0], [1, 2, 0]])
def test_neighbours_are_one_piece_in_whatever_order_they_come(order):
    src, dst = ([(8 * i, 24) for i in order], 4), ([(1000 + 8 * i, 24) for i in order], 4)
    copier = copier_of(src, dst, 8)
    assert copier.num_fragments == 1 and extents(copier, [(1, 2), (2, 3), (0, 0)]) == [(0, 1000, 24), (24, 1048, 48)]


def test_neighbours_whose_blocks_lie_apart_are_no_piece():
    """In the first block the second layer follows the first one, in the others there is room between."""
    src, dst = ([(0, 16), (8, 32)], 4), ([(1000, 16), (1008, 16)], 4)
    copier, rows = copier_of(src, dst, 8), [(2, 1), (3, 0), (0, 3)]
    assert copier.num_fragments == 2 and copied(copier, rows) == copied_naively(src, dst, 8, rows)


def test_one_source_for_many_destinations_keeps_their_order():
    rng = random.Random(0)
    rows = [(rng.randrange(3), 2 * dst_id) for dst_id in rng.sample(range(40), 40)]
    copier = copier_of(([(0, 8)], 3), ([(1000, 8)], 80), 8)
    assert extents(copier, rows) == [(8 * src, 1000 + 8 * dst, 8) for src, dst in sorted(rows, key=lambda row: row[0])]


@pytest.mark.parametrize("layers", [[], [(0, 8)]])
def test_where_there_is_nothing_to_copy_no_block_depends_on_another(layers):
    """No layers, or blocks of no bytes: they are no memory that could be read and written."""
    copier = copier_of((layers, 4), (layers, 4), 0)
    assert extents(copier, [(0, 1), (1, 2), (3, 3)]) == [] and copier.block_bytes == 0


def test_sizes_of_one_take_no_room():
    """A block of 2**62 bytes: one more dimension of 1 makes it no larger, one of 2 too large."""
    arguments = {
        "block_dim": 0, "element_bytes": 8, "num_src_blocks": 1, "num_dst_blocks": 1, "src_device": -1,
        "dst_device": -1, "pinned": False, "kernel_max_bytes": 0, "max_groups": 16,
        "srcs": [(BASE, (64, 8, 8))], "dsts": [(BASE + (1 << 62), (64, 8, 8))],
    }  # fmt: skip
    copier = _C.BlockCopier(sizes=(1, 1, 1 << 59), **arguments)
    assert (copier.block_bytes, copier.num_fragments) == (1 << 62, 1)
    with pytest.raises(ValueError, match="a block must fit into memory"):
        _C.BlockCopier(sizes=(1, 2, 1 << 59), **arguments)
