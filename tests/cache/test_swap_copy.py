"""swap_blocks, swap_blocks_layers and copy_blocks against plain torch, every destination byte compared."""

import itertools
import random
import warnings

import pytest
import torch
from support.swap_pairs import NAMES, pairs

from kvpage import ops
from kvpage.layout.cache_layout import CacheLayout
from kvpage.ops import reference
from kvpage.ops.copies import BlockCopier

CPU = torch.device("cpu")
CUDA = torch.device("cuda", 0)
LAYOUT = CacheLayout(4, 2, 8, torch.float16)


def name(names) -> str:
    return "-".join(names.values())


SAME_BACKEND = [(a, b) for a, b in itertools.product(NAMES, NAMES) if a["backend"] == b["backend"]]


def make_layout(names) -> CacheLayout:
    return CacheLayout(4, 1 if names["backend"] == "mla" else 2, 8, torch.float16, **names)


def random_caches(layout, num_blocks, num_layers, device=CPU, pin=False):
    """Bits of every kind, NaNs among them, and where the layout leaves gaps, whatever was there."""
    caches = layout.allocate(num_blocks, num_layers, device, pin)
    for cache in caches:
        cache.copy_(torch.randint(-(1 << 15), 1 << 15, cache.shape, dtype=torch.int16).view(torch.float16))
    return caches


def bits(caches) -> list[torch.Tensor]:
    return [cache.cpu().contiguous().view(torch.int16).clone() for cache in caches]


def assert_same_bits(caches, expected):
    for layer, (cache, wanted) in enumerate(zip(bits(caches), expected, strict=True)):
        assert torch.equal(cache, wanted), f"layer {layer}"


def expected_bits(srcs, dsts, mapping, layout):
    out = bits(dsts)
    for src, dst in zip(bits(srcs), out, strict=True):
        reference.swap_blocks(src, dst, mapping, layout)
    return out


def mappings(num_src, num_dst):
    rng = random.Random(num_src)
    for count in (0, 1, 2, min(num_src, num_dst)):
        targets = rng.sample(range(num_dst), count)
        yield pairs(*zip(rng.choices(range(num_src), k=count), targets, strict=True))
    length = min(num_src, num_dst) - 1
    yield pairs(*((i, i + num_dst - length) for i in range(length)))


@pytest.mark.parametrize("a, b", SAME_BACKEND, ids=name)
def test_swap_between_layouts(a, b):
    src_layout, dst_layout = (make_layout(names) for names in (a, b))
    srcs = random_caches(src_layout, 7, 3)
    for mapping in mappings(7, 9):
        for layers in ((0, 1, 2), (1,)):
            dsts = random_caches(dst_layout, 9, 3)
            expected = bits(dsts)
            expected_moved = expected_bits([srcs[i] for i in layers], [dsts[i] for i in layers], mapping, dst_layout)
            before = bits(srcs)
            if len(layers) == 1:
                ops.swap_blocks(srcs[1], dsts[1], mapping, dst_layout)
            else:
                ops.swap_blocks_layers(srcs, dsts, mapping, dst_layout)
            for i, moved in zip(layers, expected_moved, strict=True):
                expected[i] = moved
            assert_same_bits(dsts, expected)
            assert_same_bits(srcs, before)


@pytest.mark.parametrize("names", NAMES, ids=name)
def test_copy_within_a_tier(names):
    layout = make_layout(names)
    for mapping in (pairs(), pairs((3, 4)), pairs((3, 4), (3, 5), (0, 1), (6, 6)), pairs((0, 4), (1, 5), (2, 6))):
        caches = random_caches(layout, 7, 3)
        expected = expected_bits(caches, caches, mapping, layout)
        ops.copy_blocks(caches, mapping, layout)
        assert_same_bits(caches, expected)


def test_a_block_copied_to_itself_may_also_be_read():
    caches = random_caches(LAYOUT, 4, 2)
    mapping = pairs((1, 1), (1, 2), (3, 3))
    expected = expected_bits(caches, caches, mapping, LAYOUT)
    ops.copy_blocks(caches, mapping, LAYOUT)
    assert_same_bits(caches, expected)


@pytest.mark.parametrize("layer_layout", ["separate", "packed"])
@pytest.mark.parametrize("num_threads", [1, 2, 5])
@pytest.mark.parametrize("odd", [0, 1])
def test_large_copies_with_threads_and_streaming_stores(layer_layout, num_threads, odd):
    """48 MiB in blocks whose length is no multiple of a cache line: past the caches' size, cut within extents."""
    layout = CacheLayout(16, 3, 64 + odd, torch.int16, layer_layout=layer_layout)
    num_blocks = (48 << 20) // (2 * layout.block_bytes)
    srcs, dsts = (layout.allocate(num_blocks + 3, 2, CPU) for _ in range(2))
    for cache in (*srcs, *dsts):
        cache.copy_(torch.randint(-(1 << 15), 1 << 15, cache.shape, dtype=torch.int16))
    mapping = torch.stack([torch.randperm(num_blocks), torch.randperm(num_blocks) + 3], 1)
    for rows in (mapping, torch.stack([torch.arange(num_blocks), torch.arange(num_blocks) + 3], 1)):
        expected = expected_bits(srcs, dsts, rows, layout)
        saved = torch.get_num_threads()
        torch.set_num_threads(num_threads)
        try:
            ops.swap_blocks_layers(srcs, dsts, rows, layout)
        finally:
            torch.set_num_threads(saved)
        assert_same_bits(dsts, expected)


def test_a_mapping_may_be_strided():
    srcs, dsts = random_caches(LAYOUT, 5, 1), random_caches(LAYOUT, 5, 1)
    mapping = torch.tensor([[0, 1, 9], [3, 4, 9]]).t()[:2].t()  # rows (0, 1), (3, 4)
    assert not mapping.is_contiguous()
    expected = expected_bits(srcs, dsts, mapping, LAYOUT)
    ops.swap_blocks_layers(srcs, dsts, mapping, LAYOUT)
    assert_same_bits(dsts, expected)


def test_views_that_torch_negates():
    srcs, dsts = random_caches(LAYOUT, 5, 1), random_caches(LAYOUT, 5, 1)
    mapping = pairs((1, 2), (3, 4))
    expected = expected_bits(srcs, dsts, mapping, LAYOUT)
    for sides, name in (((srcs, [torch._neg_view(dsts[0])]), "dst"), (([torch._neg_view(srcs[0])], dsts), "src")):
        with pytest.raises(ValueError, match=rf"{name}\[0\] must not be a view that torch negates or conjugates"):
            ops.swap_blocks_layers(*sides, mapping, LAYOUT)
    ops.swap_blocks_layers(srcs, dsts, torch._neg_view(-mapping), LAYOUT)
    assert_same_bits(dsts, expected)


BAD_MAPPINGS = {
    "not a tensor": ([[0, 1]], TypeError, "block_mapping must be a torch.Tensor, got list"),
    "dtype": (torch.zeros(1, 2, dtype=torch.int32), ValueError, "dtype must be torch.int64, got torch.int32"),
    "shape": (torch.zeros(2, 3, dtype=torch.int64), ValueError, r"shape must be \[num_pairs, 2\], got \[2, 3\]"),
    "dimensions": (torch.zeros(2, dtype=torch.int64), ValueError, r"shape must be \[num_pairs, 2\], got \[2\]"),
    "device": (torch.zeros(1, 2, dtype=torch.int64, device="meta"), ValueError, "must be on the CPU, got meta"),
    "negative source": (pairs((0, 1), (-1, 0)), ValueError, r"source blocks in \[0, 5\), got -1 in row 1"),
    "source too large": (pairs((5, 0)), ValueError, r"source blocks in \[0, 5\), got 5 in row 0"),
    "negative destination": (pairs((0, -1)), ValueError, r"destination blocks in \[0, 5\), got -1 in row 0"),
    "destination too large": (pairs((0, 1), (0, 5)), ValueError, r"destination blocks in \[0, 5\), got 5 in row 1"),
    "beyond 32 bits": (pairs((1 << 32, 0)), ValueError, "got 4294967296 in row 0"),
    "destination twice": (pairs((0, 1), (2, 3), (4, 1)), ValueError, "each destination once, got 1 again in row 2"),
}
BAD_WITHIN = {
    "chain": (pairs((0, 1), (1, 2)), ValueError, "must not read a block that it also writes, got block 1"),
    "exchange": (pairs((3, 4), (4, 3)), ValueError, "got block 3 on both sides"),
    "itself and another": (pairs((1, 1), (0, 1)), ValueError, "each destination once"),
}


def test_what_is_no_cache_is_named():
    dsts = random_caches(LAYOUT, 5, 1)
    with pytest.raises(TypeError, match=r"src\[0\] must be a torch.Tensor, got NoneType"):
        ops.swap_blocks(None, dsts[0], pairs((0, 1)), LAYOUT)
    with pytest.raises(TypeError, match="layout must be a CacheLayout, got str"):
        ops.copy_blocks(dsts, pairs((0, 1)), "flash")


@pytest.mark.parametrize("mapping, error, message", BAD_MAPPINGS.values(), ids=BAD_MAPPINGS)
def test_bad_mappings_change_nothing(mapping, error, message):
    srcs, dsts = random_caches(LAYOUT, 5, 2), random_caches(LAYOUT, 5, 2)
    before = bits(srcs), bits(dsts)
    with pytest.raises(error, match=message):
        ops.swap_blocks(srcs[0], dsts[0], mapping, LAYOUT)
    with pytest.raises(error, match=message):
        ops.swap_blocks_layers(srcs, dsts, mapping, LAYOUT)
    with pytest.raises(error, match=message):
        ops.copy_blocks(dsts, mapping, LAYOUT)
    assert_same_bits(srcs, before[0])
    assert_same_bits(dsts, before[1])


@pytest.mark.parametrize("mapping, error, message", BAD_WITHIN.values(), ids=BAD_WITHIN)
@pytest.mark.parametrize("layer_layout", ["separate", "packed"])
def test_order_within_a_tier_never_matters(mapping, error, message, layer_layout):
    layout = CacheLayout(4, 2, 8, torch.float16, layer_layout=layer_layout)
    caches = random_caches(layout, 5, 2)
    before = bits(caches)
    with pytest.raises(error, match=message):
        ops.copy_blocks(caches, mapping, layout)
    with pytest.raises(error, match=message):
        ops.swap_blocks_layers(caches, caches, mapping, layout)
    with pytest.raises(error, match=message):
        ops.swap_blocks(caches[1], caches[1], mapping, layout)
    assert_same_bits(caches, before)


def bad_sides():
    good, other = random_caches(LAYOUT, 5, 2), random_caches(LAYOUT, 5, 2)
    yield [*good, other[0]], other, "as many layers, got 3 and 2"
    yield [good[0], good[1].float()], other, r"src\[1\].dtype must be torch.float16, got torch.float32"
    yield good, [other[0], other[1].view(torch.bfloat16)], r"dst\[1\].dtype must be torch.float16"
    yield [good[0][..., :4], good[1]], other, r"src\[0\].shape must be"
    yield [good[0].permute(1, 0, 2, 3, 4), good[1]], other, r"src\[0\].shape must be"
    yield good, [other[0], other[1][:, :4]], r"dst must have as many blocks in each layer, got \[4, 5\]"
    yield [good[0], good[1].to("meta")], other, "src must be on one device, got cpu, meta"
    yield [cache.to("meta") for cache in good], other, "src must be on the CPU or a CUDA device, got meta"


@pytest.mark.parametrize("index", range(8))
def test_caches_that_do_not_fit_change_nothing(index):
    srcs, dsts, message = list(bad_sides())[index]
    before = bits(dsts)
    with pytest.raises(ValueError, match=message):
        ops.swap_blocks_layers(srcs, dsts, pairs((0, 1)), LAYOUT)
    assert_same_bits(dsts, before)


def test_without_native_cuda_torch_does_it_and_checks_alike(monkeypatch):
    """What a CUDA tensor meets in a build without CUDA, on CPU tensors: the ids are still checked first."""
    srcs, dsts = random_caches(LAYOUT, 5, 2), random_caches(LAYOUT, 5, 2)
    copier = BlockCopier(srcs, dsts, LAYOUT)
    copier._torch_only = True
    monkeypatch.setattr(copier, "_native", _NeverRun(copier._native))
    before = bits(dsts)
    with pytest.raises(ValueError, match="each destination once"):
        copier.run(pairs((0, 1), (2, 1)))
    assert_same_bits(dsts, before)
    expected = expected_bits(srcs, dsts, pairs((4, 0), (0, 3)), LAYOUT)
    copier.run(pairs((4, 0), (0, 3)))
    assert_same_bits(dsts, expected)


class _NeverRun:
    def __init__(self, native):
        self.check = native.check


def test_the_warning_names_the_reason(monkeypatch):
    import kvpage._C as _C
    from kvpage.ops import copies as block_copy

    monkeypatch.setattr(_C, "cuda_error", lambda: "no reason")
    with pytest.warns(RuntimeWarning, match="with torch operations: no reason"):
        assert not block_copy._native_cuda()
    monkeypatch.setattr(_C, "cuda_error", lambda: None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert block_copy._native_cuda()


# --- on a GPU -------------------------------------------------------------------------------------------------------

DIRECTIONS = {"H2D": (CPU, CUDA), "D2H": (CUDA, CPU), "D2D": (CUDA, CUDA)}


@pytest.mark.gpu
@pytest.mark.parametrize("kernel_max_bytes", [0, 1 << 40], ids=["engine", "kernel"])
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("a, b", SAME_BACKEND, ids=name)
def test_gpu_swap(a, b, direction, kernel_max_bytes):
    """On the null stream and another, from and to pinned and pageable memory."""
    src_device, dst_device = DIRECTIONS[direction]
    src_layout, dst_layout = (make_layout(names) for names in (a, b))
    streams = torch.cuda.default_stream(), torch.cuda.Stream()
    for stream, pin in itertools.product(streams, (True, False)):
        srcs = random_caches(src_layout, 7, 3, src_device, pin and src_device == CPU)
        for mapping in mappings(7, 9):
            dsts = random_caches(dst_layout, 9, 3, dst_device, pin and dst_device == CPU)
            expected = expected_bits(srcs, dsts, mapping, dst_layout)
            torch.cuda.synchronize()
            copier = BlockCopier(srcs, dsts, dst_layout, kernel_max_bytes)
            if direction != "D2D" and len(copier._native.extents(mapping.data_ptr(), len(mapping))) > 1:
                assert copier.executor(mapping) == ("kernel" if pin and kernel_max_bytes else "engine")
            with torch.cuda.stream(stream):
                copier.run(mapping)
            torch.cuda.synchronize()
            assert_same_bits(dsts, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("max_groups", [1, 16])
@pytest.mark.parametrize("num_layers, num_blocks", [(40, 9000), (500, 40)], ids=["many pairs", "many pieces"])
def test_gpu_more_than_one_launch(direction, max_groups, num_layers, num_blocks):
    """What kernel parameters cannot hold goes into several launches, on few thread groups too."""
    src_device, dst_device = DIRECTIONS[direction]
    layout = CacheLayout(1, 1, 8, torch.float16)
    srcs = random_caches(layout, num_blocks, num_layers, src_device, src_device == CPU)
    dsts = random_caches(layout, num_blocks + 1, num_layers, dst_device, dst_device == CPU)
    mapping = torch.stack([torch.randperm(num_blocks), torch.randperm(num_blocks) + 1], 1)
    expected = expected_bits(srcs, dsts, mapping, layout)
    BlockCopier(srcs, dsts, layout, 1 << 40, max_groups).run(mapping)
    torch.cuda.synchronize()
    assert_same_bits(dsts, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("names", NAMES, ids=name)
@pytest.mark.parametrize("num_blocks, num_layers", [(1, 1), (7, 3), (700, 40)])
def test_gpu_copy_within_a_tier(names, num_blocks, num_layers):
    """All sizes are one launch or a few; none waits for the device."""
    layout = make_layout(names)
    half = num_blocks // 2
    mapping = torch.stack([torch.randint(0, max(half, 1), (half,)), torch.randperm(half) + num_blocks - half], 1)
    caches = random_caches(layout, num_blocks, num_layers, CUDA)
    expected = expected_bits(caches, caches, mapping, layout)
    ops.copy_blocks(caches, mapping, layout)
    assert_same_bits(caches, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("direction", ["H2D", "D2H", "D2D"])
@pytest.mark.parametrize("on_default_stream", [True, False])
def test_gpu_copies_are_ordered_with_the_work_around_them(direction, on_default_stream):
    """Long work writes the source before the swap and rewrites it after: the swap sees exactly what is between."""
    src_device, dst_device = DIRECTIONS[direction]
    layout = CacheLayout(16, 8, 128, torch.float16)
    srcs = layout.allocate(64, 8, src_device, src_device == CPU)
    dsts = layout.allocate(64, 8, dst_device, dst_device == CPU)
    filler = torch.empty(1 << 28, device=CUDA)
    torch.cuda.synchronize()
    stream = torch.cuda.default_stream() if on_default_stream else torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(10):
            filler.normal_()
        for cache in srcs:
            cache.fill_(1)
        if dst_device == CUDA:
            for cache in dsts:
                cache.fill_(7)
        ops.swap_blocks_layers(srcs, dsts, pairs(*((i, 63 - i) for i in range(64))), layout)
        if src_device == CUDA:
            for cache in srcs:
                cache.fill_(2)
        seen = [cache.clone() for cache in dsts] if dst_device == CUDA else None
    stream.synchronize()
    for cache in seen or dsts:
        assert bool((cache == 1).all())


@pytest.mark.gpu
def test_gpu_a_capturing_stream_raises():
    srcs = random_caches(LAYOUT, 5, 1, CPU, True)
    dsts = random_caches(LAYOUT, 5, 1, CUDA)
    copiers = BlockCopier(srcs, dsts, LAYOUT), BlockCopier(srcs, dsts, LAYOUT, 1 << 40), BlockCopier(dsts, dsts, LAYOUT)
    before = bits(dsts)
    for copier in copiers:
        with pytest.raises(ValueError, match="must not be capturing"), torch.cuda.graph(torch.cuda.CUDAGraph()):
            copier.run(pairs((0, 1), (4, 3)))
    torch.cuda.synchronize()
    assert_same_bits(dsts, before)


@pytest.mark.gpu
def test_gpu_bad_mappings_change_nothing():
    srcs, dsts = random_caches(LAYOUT, 5, 2, CPU, True), random_caches(LAYOUT, 5, 2, CUDA)
    before = bits(dsts)
    for mapping, error, message in BAD_MAPPINGS.values():
        with pytest.raises(error, match=message):
            ops.swap_blocks_layers(srcs, dsts, mapping, LAYOUT)
    for mapping, error, message in BAD_WITHIN.values():
        with pytest.raises(error, match=message):
            ops.copy_blocks(dsts, mapping, LAYOUT)
    torch.cuda.synchronize()
    assert_same_bits(dsts, before)


@pytest.mark.parametrize("side", ["src", "dst", "block_mapping"])
@pytest.mark.parametrize("kind", ["without memory", "sparse", "nested"])
def test_a_tensor_without_elements_in_memory_is_refused(side, kind):
    layout = CacheLayout(4, 2, 8, torch.float32)
    src, dst = (layout.allocate(3, 1, torch.device("cpu"))[0] for _ in range(2))
    given = {"src": src, "dst": dst.fill_(7), "block_mapping": torch.tensor([[0, 1]])}
    bad = given[side].clone()
    if kind == "without memory":
        bad.untyped_storage().resize_(0)
    given[side] = {"sparse": bad.to_sparse, "nested": lambda: torch.nested.nested_tensor([bad, bad])}.get(
        kind, lambda: bad
    )()
    with pytest.raises(ValueError, match="must have memory|tensor with strides"):
        ops.swap_blocks(**given, layout=layout)
    assert side == "dst" or bool((dst == 7).all())
