"""Plans: which extents a mapping becomes, and that the kernel's body copies what they say."""

import random

import pytest
import torch
from support.insides import native_of

import kvpage._C as _C
from kvpage.layout.cache_layout import CacheLayout
from kvpage.ops.copies import BlockCopier

CPU = torch.device("cpu")


def layout(block_size=4, heads=2, head_size=8, dtype=torch.float16, **names) -> CacheLayout:
    return CacheLayout(block_size, heads, head_size, dtype, **names)


def pairs(*rows) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.int64).reshape(-1, 2)


def extents(copier: BlockCopier, mapping: torch.Tensor) -> list[tuple[int, int, int]]:
    return native_of(copier).extents(mapping.data_ptr(), len(mapping))


def two_sides(src_layout, dst_layout, num_layers=3, num_blocks=(9, 11)):
    src = src_layout.allocate(num_blocks[0], num_layers, CPU)
    dst = dst_layout.allocate(num_blocks[1], num_layers, CPU)
    return src, dst, BlockCopier(src, dst, dst_layout)


def test_packed_slab_is_one_piece_and_neighbours_one_extent():
    packed = layout(layer_layout="packed")
    src, dst, copier = two_sides(packed, packed)
    block = 3 * packed.block_bytes
    assert (native_of(copier).num_fragments, native_of(copier).block_bytes) == (1, block)
    got = extents(copier, pairs((7, 1), (3, 5), (4, 6), (5, 7), (6, 9)))
    at_src, at_dst = src[0].data_ptr(), dst[0].data_ptr()
    assert got == [
        (at_src + 3 * block, at_dst + 5 * block, 3 * block),
        (at_src + 6 * block, at_dst + 9 * block, block),
        (at_src + 7 * block, at_dst + 1 * block, block),
    ]


@pytest.mark.parametrize("backend, pieces_a_layer", [("flash", 2), ("flashinfer", 1)])
@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
def test_separate_layers_give_each_run_of_memory_once(backend, pieces_a_layer, kv_layout):
    each = layout(backend=backend, kv_layout=kv_layout)
    _, _, copier = two_sides(each, each)
    assert native_of(copier).num_fragments == 3 * pieces_a_layer
    runs = extents(copier, pairs((0, 3), (1, 4), (3, 6)))
    piece = each.block_bytes // pieces_a_layer
    assert sorted(size for _, _, size in runs) == sorted([2 * piece, piece] * (3 * pieces_a_layer))


def test_pieces_are_what_both_sides_have_in_common():
    nhd, hnd = layout(), layout(kv_layout="HND")
    packed = layout(layer_layout="packed")
    row = 8 * 2
    assert native_of(two_sides(nhd, hnd)[2]).num_fragments == 3 * 2 * 4 * 2
    assert {size for _, _, size in extents(two_sides(nhd, hnd)[2], pairs((0, 1)))} == {row}
    assert {size for _, _, size in extents(two_sides(packed, nhd)[2], pairs((0, 1), (1, 2)))} == {4 * 2 * row}


def test_one_block_a_side_needs_no_step():
    each = layout()
    _, _, copier = two_sides(each, each, num_layers=1, num_blocks=(1, 1))
    assert [size for _, _, size in extents(copier, pairs((0, 0)))] == [each.block_bytes]


@pytest.mark.parametrize("layer_layout", ["separate", "packed"])
def test_shares_cut_the_plan_without_gap_or_overlap(layer_layout):
    each = layout(layer_layout=layer_layout)
    _, _, copier = two_sides(each, each)
    mapping = pairs((0, 3), (1, 4), (6, 1), (2, 5))

    def bytes_of(begin, end):
        shares = native_of(copier).extents(mapping.data_ptr(), len(mapping), begin, end)
        return [(src + i, dst + i) for src, dst, size in shares for i in range(size)]

    whole = bytes_of(0, 1 << 40)
    assert len(whole) == len(set(whole)) == 4 * 3 * each.block_bytes
    for num_shares in (1, 2, 7, 100):
        cuts = [len(whole) * share // num_shares for share in range(num_shares + 1)]
        assert sum(map(bytes_of, cuts, cuts[1:]), []) == whole


@pytest.mark.parametrize("num_blocks", [(0, 4), (4, 0), (0, 0)])
def test_no_blocks(num_blocks):
    each = layout()
    _, _, copier = two_sides(each, each, num_blocks=num_blocks)
    copier.run(pairs())
    with pytest.raises(ValueError, match=r"blocks in \[0, 0\)"):
        copier.run(pairs((0, 0)))


def test_no_layers():
    copier = BlockCopier([], [], layout())
    copier.run(pairs())
    assert native_of(copier).num_fragments == 0


def test_views_of_one_slab_that_share_no_byte_are_two_sides():
    packed = layout(layer_layout="packed")
    slab = packed.allocate(8, 4, CPU)
    BlockCopier(slab[:2], slab[2:], packed).run(pairs((1, 2), (2, 1)))  # would depend on order within one cache
    BlockCopier([c[:, :4] for c in slab], [c[:, 4:] for c in slab], packed).run(pairs((1, 2), (2, 1)))
    BlockCopier([c[:, ::2] for c in slab], [c[:, 1::2] for c in slab], packed).run(pairs((1, 2), (2, 1)))


def test_the_stride_of_a_single_block_means_nothing():
    packed = layout(layer_layout="packed")
    slab = packed.allocate(8, 4, CPU)
    alone = [c[:, 3:4].as_strided((2, 1, 4, 2, 8), (c.stride(0), 12345, *c.stride()[2:])) for c in slab[2:]]
    slab[0][:, 5] = 1
    BlockCopier(slab[:2], alone, packed).run(pairs((5, 0)))
    assert bool((slab[2][:, 3] == 1).all()) and slab[2].sum() == packed.block_bytes // 2


@pytest.mark.parametrize("layer_layout", ["separate", "packed"])
def test_overlapping_sides_raise(layer_layout):
    each = layout(layer_layout=layer_layout)
    slab = each.allocate(8, 2, CPU)
    with pytest.raises(ValueError, match="share no memory"):
        BlockCopier([c[:, :5] for c in slab], [c[:, 4:] for c in slab], each)
    with pytest.raises(ValueError, match="share no memory"):
        BlockCopier(slab, slab[::-1], each)


def test_destination_that_overlaps_itself_raises():
    each = layout()
    (cache,) = each.allocate(4, 1, CPU)
    src = each.allocate(4, 2, CPU)
    for dsts in ([cache, cache], [cache[:, :1].expand(cache.shape)] * 2, [cache[:1].expand(cache.shape), src[0]]):
        with pytest.raises(ValueError, match="dst must not overlap itself"):
            BlockCopier(src, dsts, each)


def test_a_source_may_be_expanded():
    each = layout()
    (one,) = each.allocate(1, 1, CPU)
    one.normal_()
    (dst,) = each.allocate(3, 1, CPU)
    BlockCopier([one.expand(each.shape(3))], [dst], each).run(pairs((2, 1)))
    assert torch.equal(dst[:, 1], one[:, 0]) and not dst[:, [0, 2]].any()


def random_mapping(rng, num_src, num_dst):
    count = rng.randint(0, min(num_src, num_dst))
    rows = list(zip(rng.choices(range(num_src), k=count), rng.sample(range(num_dst), count), strict=True))
    return pairs(*rows)


@pytest.mark.parametrize("seed", range(40))
def test_kernel_body_copies_the_plan(seed):
    """Every vector width that fits, grids and launches smaller than the work, all destination bytes compared."""
    rng = random.Random(seed)
    sizes = rng.choice([(1, 1, 1), (3, 1, 5), (4, 2, 8), (16, 3, 24), (5, 2, 7)])
    dtype = rng.choice([torch.uint8, torch.float16, torch.float32])
    backend = rng.choice(["flash", "flashinfer"])
    sides = [
        CacheLayout(*sizes, dtype, backend, rng.choice(["NHD", "HND"]), rng.choice(["separate", "packed"]))
        for _ in range(2)
    ]
    num_blocks = rng.choice([1, 2, 7]), rng.choice([1, 2, 9])
    src, dst, copier = two_sides(*sides, num_layers=rng.choice([1, 3]), num_blocks=num_blocks)
    mapping = random_mapping(rng, *num_blocks)
    widths = [0] + [width for width in (1, 2, 4, 8, 16) if width <= dtype.itemsize]
    for cache in src:
        cache.copy_(torch.randint(0, 200, cache.shape))
    for width in widths:
        for max_threads, capacity in ((32, 1 << 15), (96, 1 << 30), (1 << 30, 96), (1 << 30, 250)):
            for cache in dst:
                cache.fill_(201)
            _C._copy_kernel_on_host(native_of(copier), mapping.data_ptr(), len(mapping), width, max_threads, capacity)
            for a, b in zip(src, dst, strict=True):
                expected = torch.full_like(b, 201)
                dim = sides[0].block_dim
                expected.index_copy_(dim, mapping[:, 1], a.index_select(dim, mapping[:, 0]))
                assert torch.equal(b, expected), (seed, width, max_threads, capacity)


def test_kernel_body_refuses_a_vector_that_does_not_divide():
    each = CacheLayout(1, 1, 3, torch.float16)
    src, dst, copier = two_sides(each, each)
    mapping = pairs((0, 1))
    for width in (-1, 3, 4, 16):
        with pytest.raises(ValueError, match="vector_bytes must divide 2"):
            _C._copy_kernel_on_host(native_of(copier), mapping.data_ptr(), 1, width)
    with pytest.raises(ValueError, match="multiple of 32"):
        _C._copy_kernel_on_host(native_of(copier), mapping.data_ptr(), 1, 2, 33)
    with pytest.raises(ValueError, match="capacity must be at least 96 bytes, got 95"):
        _C._copy_kernel_on_host(native_of(copier), mapping.data_ptr(), 1, 2, 32, 95)
    assert not any(cache.any() for cache in dst)


@pytest.mark.parametrize("offset, width", [(1, 1), (2, 2), (4, 4), (8, 8), (16, 16), (48, 16)])
@pytest.mark.parametrize("side", ["src", "dst"])
@pytest.mark.parametrize("what", ["start", "step"])
def test_vectors_are_as_wide_as_addresses_are_aligned(offset, width, side, what):
    """Blocks of 512 bytes whose memory starts `offset` bytes after a boundary, or that lie 512 + offset bytes apart."""
    each = CacheLayout(4, 1, 64, torch.uint8, backend="flashinfer")

    def cache(shift):
        memory = torch.zeros(64 + 3 * 1024, dtype=torch.uint8)
        start, step = (shift, 512) if what == "start" else (0, 512 + shift)
        return memory.as_strided(each.shape(3), (step, 256, 64, 64, 1), start)

    src, dst = cache(offset * (side == "src")), cache(offset * (side == "dst"))
    src.copy_(torch.randint(0, 256, src.shape))
    copier, mapping = BlockCopier([src], [dst], each), pairs((2, 1))
    for wider in (2 * width, 4 * width):
        with pytest.raises(ValueError, match=f"vector_bytes must divide {width}, got {wider}"):
            _C._copy_kernel_on_host(native_of(copier), mapping.data_ptr(), 1, wider)
    _C._copy_kernel_on_host(native_of(copier), mapping.data_ptr(), 1, width)
    assert torch.equal(dst[1], src[2]) and not dst[[0, 2]].any()


PIECE, PAIR = 40, 8  # bytes of each among a launch's parameters


@pytest.mark.parametrize("num_fragments", [0, 1, 2, 3, 64, 500, 8192])
@pytest.mark.parametrize("num_pairs", [0, 1, 2, 256, 3760, 3761, 65536])
@pytest.mark.parametrize("capacity", [96, 4032, 32640])
def test_launches_cover_the_plan_once_and_fit(num_fragments, num_pairs, capacity):
    if capacity == 96:  # two of each: else there would be millions of launches
        num_fragments, num_pairs = min(num_fragments, 65), min(num_pairs, 257)
    tiles = _C._split_for_launches(num_fragments, num_pairs, capacity)
    assert all(pieces * PIECE + pairs_ * PAIR <= capacity for _, pieces, _, pairs_ in tiles)
    spans = [sorted({tile[i : i + 2] for tile in map(tuple, tiles)}) for i in (0, 2)]
    assert len(tiles) == len(spans[0]) * len(spans[1]) == len({(tile[0], tile[2]) for tile in tiles})
    for span, total in zip(spans, (num_fragments, num_pairs), strict=True):
        if tiles:
            assert [begin for begin, _ in span] == [sum(n for _, n in span[:i]) for i in range(len(span))]
            assert sum(n for _, n in span) == total
    assert bool(tiles) == (num_fragments > 0 and num_pairs > 0)


def test_what_fits_is_one_launch_and_the_rest_few():
    assert len(_C._split_for_launches(64, 3760, 32640)) == 1
    assert len(_C._split_for_launches(64, 65536, 32640)) == 18
    assert len(_C._split_for_launches(8192, 1, 32640)) == 11


@pytest.mark.parametrize(
    "changes, expected",
    {
        "small": ({}, "kernel"),
        "as large as allowed": ({"extent_bytes": 8192}, "kernel"),
        "larger": ({"extent_bytes": 8193}, "engine"),
        "one extent": ({"num_extents": 1}, "engine"),
        "two extents": ({"num_extents": 2}, "kernel"),
        "nothing to copy": ({"num_extents": 0, "extent_bytes": 0}, "engine"),
        "pageable": ({"pinned": False}, "engine"),
        "not measured": ({"kernel_max_bytes": 0}, "engine"),
        "out": ({"src_device": 1, "dst_device": -1}, "kernel"),
        "within the device": ({"src_device": 1, "extent_bytes": 1 << 40, "num_extents": 1}, "kernel"),
        "within the host": ({"dst_device": -1}, "host"),
    }.values(),
)
def test_which_executor_copies(changes, expected):
    arguments = {
        "src_device": -1, "dst_device": 1, "pinned": True, "extent_bytes": 2048, "num_extents": 64,
        "kernel_max_bytes": 8192,
    }  # fmt: skip
    assert _C.choose_executor(**(arguments | changes)) == expected


def test_the_host_is_never_left_to_a_kernel():
    each = layout()
    (src,), (dst,) = each.allocate(4, 1, CPU), each.allocate(4, 1, CPU)
    copier = BlockCopier([src], [dst], each, kernel_max_bytes=1 << 40)
    assert copier.executor(pairs((0, 1), (1, 3))) == "host"
    with pytest.raises(ValueError, match="each destination once"):
        copier.executor(pairs((0, 1), (1, 1)))


def native(srcs=((1 << 20, (64, 8)),), dsts=((2 << 20, (64, 8)),), **changes):
    """A copier over addresses that are never read: 4 blocks of 8 elements of 8 bytes."""
    arguments = {
        "sizes": (1, 8), "block_dim": 0, "element_bytes": 8, "srcs": list(srcs), "dsts": list(dsts),
        "num_src_blocks": 4, "num_dst_blocks": 4, "src_device": -1, "dst_device": -1, "pinned": False,
        "kernel_max_bytes": 0, "max_groups": 16,
    }  # fmt: skip
    return _C.BlockCopier(**(arguments | changes))


def test_native_validation():
    assert native().num_fragments == 1
    with pytest.raises(ValueError, match="as many layers, got 1 and 0"):
        native(dsts=())
    with pytest.raises(ValueError, match="31 bits, got 2147483648 blocks"):
        native(num_dst_blocks=1 << 31)
    with pytest.raises(ValueError, match="31 bits, got -1 blocks"):
        native(num_src_blocks=-1)
    with pytest.raises(ValueError, match="src must have 2 strides a layer, got 1"):
        native(srcs=[(1 << 20, (64,))])
    with pytest.raises(ValueError, match="block_dim must be a dimension of 2, got 2"):
        native(block_dim=2)
    with pytest.raises(ValueError, match="one device|without CUDA"):
        native(src_device=0, dst_device=1)
    with pytest.raises(ValueError, match="kernel_max_bytes must not be negative, got -1"):
        native(kernel_max_bytes=-1)
    for max_groups in (0, (1 << 20) + 1):
        with pytest.raises(ValueError, match=f"max_groups must be between 1 and 1048576, got {max_groups}"):
            native(max_groups=max_groups)


def test_addresses_beyond_32_bits():
    far = native(srcs=[(1 << 47, (1 << 30, 8))], dsts=[(1 << 20, (1 << 30, 8))], num_src_blocks=1 << 12,
                 num_dst_blocks=1 << 12)  # fmt: skip
    mapping = pairs((4095, 4094))
    expected = ((1 << 47) + (4095 << 30), (1 << 20) + (4094 << 30), 64)
    assert far.extents(mapping.data_ptr(), 1) == [expected]
