"""Copy plans: many blocks, and numbers that no cache has."""

import pytest
import torch

import kvpage._C as _C

FAR = (1 << 20, (64, 8))
MANY = 200


def native(src=FAR, dst=(2 << 20, (64, 8)), **changes):
    """A copier over addresses that are never read: blocks of 8 elements of 8 bytes."""
    arguments = {
        "sizes": (1, 8), "block_dim": 0, "element_bytes": 8, "srcs": [src], "dsts": [dst],
        "num_src_blocks": 4, "num_dst_blocks": 4, "src_device": -1, "dst_device": -1, "pinned": False,
        "kernel_max_bytes": 0, "max_groups": 16,
    }  # fmt: skip
    return _C.BlockCopier(**(arguments | changes))


def extents(copier, rows: list[tuple[int, int]]) -> list[tuple[int, int, int]]:
    mapping = torch.tensor(rows, dtype=torch.int64).reshape(-1, 2)
    return copier.extents(mapping.data_ptr(), len(mapping))


def test_each_of_many_destinations_once():
    copier = native(num_src_blocks=MANY, num_dst_blocks=MANY, dst=(1 << 30, (64, 8)))
    backwards = [(block_id, MANY - 1 - block_id) for block_id in range(MANY)]
    got = extents(copier, backwards)
    assert got == [((1 << 20) + 64 * src, (1 << 30) + 64 * dst, 64) for src, dst in backwards]
    for block_id in range(MANY):
        with pytest.raises(ValueError, match=f"name each destination once, got {block_id} again in row {MANY}"):
            extents(copier, [*backwards, (0, block_id)])


def test_within_one_cache_none_of_many_is_read_and_written():
    copier = native(dst=FAR, num_src_blocks=MANY, num_dst_blocks=MANY)
    even = [(block_id, block_id + 1) for block_id in range(0, MANY, 2)]
    assert len(extents(copier, even)) == MANY // 2
    for block_id in range(1, MANY - 2, 2):
        rest = [pair for pair in even if pair[1] != block_id + 2]
        with pytest.raises(ValueError, match=f"must not read a block that it also writes, got block {block_id} on"):
            extents(copier, [*rest, (block_id, block_id + 2)])


def test_a_block_onto_itself_is_no_copy():
    copier = native(dst=FAR)
    assert extents(copier, [(1, 1), (2, 3)]) == [((1 << 20) + 128, (1 << 20) + 192, 64)]
    with pytest.raises(ValueError, match="each destination once, got 1 again in row 1"):
        extents(copier, [(1, 1), (0, 1)])


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"element_bytes": 0}, "element_bytes must be positive, got 0"),
        ({"element_bytes": -1}, "element_bytes must be positive, got -1"),
        ({"sizes": (1, -1)}, "sizes must not be negative, got -1"),
        ({"sizes": (1, 1 << 60)}, "a block must fit into memory"),
        ({"sizes": (0, 1 << 60)}, "a block must fit into memory"),
        ({"block_dim": -1}, "block_dim must be a dimension of 2, got -1"),
        ({"num_dst_blocks": -1}, "dst must have block ids of 31 bits, got -1 blocks"),
        ({"num_src_blocks": 1 << 31}, "src must have block ids of 31 bits, got 2147483648 blocks"),
    ],
)
def test_numbers_that_no_cache_has(changes, message):
    with pytest.raises(ValueError, match=message):
        native(**changes)


@pytest.mark.parametrize("size", [0, 1, 2])
def test_small_blocks(size):
    copier = native(sizes=(1, size), num_src_blocks=(1 << 31) - 1, dst=(1 << 47, (64, 8)))
    assert copier.block_bytes == 8 * size and copier.num_fragments == (size > 0)


def test_fewer_than_no_pairs():
    with pytest.raises(ValueError, match="num_pairs must not be negative, got -1"):
        native().extents(torch.zeros(2, dtype=torch.int64).data_ptr(), -1)
    assert extents(native(), []) == []


@pytest.mark.parametrize("gap, meets", [(-8, True), (0, False), (8, False)])
@pytest.mark.parametrize("swapped", [False, True])
def test_sides_that_touch_share_nothing(gap, meets, swapped):
    """Four blocks of 64 bytes a side, one behind the other."""
    first, second = FAR, ((1 << 20) + 4 * 64 + gap, (64, 8))
    sides = {"src": second, "dst": first} if swapped else {"src": first, "dst": second}
    if meets:
        with pytest.raises(ValueError, match="share no memory"):
            native(**sides)
    else:
        assert native(**sides).num_fragments == 1


@pytest.mark.parametrize("changes", [{"dst": (1 << 20, (128, 8))}, {"num_dst_blocks": 3}])
def test_one_memory_under_two_views(changes):
    """At one address, with other strides or another number of blocks, it is not the same cache."""
    with pytest.raises(ValueError, match="must be the same caches or share no memory"):
        native(**({"dst": FAR} | changes))
