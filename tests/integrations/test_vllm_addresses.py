"""vLLM's operations on raw addresses: extents between registered caches."""

import itertools

import pytest
import torch
from support.vllm_tensors import Unchanged

from kvpage.integrations import vllm_ops

# --- raw addresses ---------------------------------------------------------------------------------------------------


@pytest.fixture
def registered():
    """Two sources and two destinations of bytes, registered while the test runs."""
    tensors = [torch.randint(0, 256, (1000,), dtype=torch.uint8) for _ in range(4)]
    vllm_ops.register_caches(tensors)
    yield tensors
    vllm_ops.unregister_caches(tensors)


def addresses(*places):
    """int64 of (tensor, offset in bytes)."""
    return torch.tensor([tensor.data_ptr() + offset for tensor, offset in places], dtype=torch.int64)


def test_extents_of_any_size_between_any_caches(registered):
    a, b, c, d = registered
    expected = [c.clone(), d.clone()]
    extents = [(a, 0, c, 500, 100), (b, 1, d, 3, 7), (a, 100, c, 600, 100), (b, 990, c, 0, 10), (a, 0, d, 900, 100)]
    extents += [(b, 55, d, 77, 0)]
    for src, src_at, dst, dst_at, size in extents:
        want = expected[0 if dst is c else 1]
        want[dst_at : dst_at + size] = src[src_at : src_at + size]
    vllm_ops.swap_blocks_batch(
        addresses(*((src, at) for src, at, *_ in extents)),
        addresses(*((dst, at) for _, _, dst, at, _ in extents)),
        torch.tensor([size for *_, size in extents]),
        is_src_access_order_any=True,
    )
    assert torch.equal(c, expected[0])
    assert torch.equal(d, expected[1])


def test_many_random_extents(registered):
    generator = torch.Generator().manual_seed(3)
    for _ in range(50):
        sources, targets = torch.cat(registered[:2]), torch.cat(registered[2:])
        count = int(torch.randint(0, 40, (1,), generator=generator))
        sizes = torch.randint(0, 25, (count,), generator=generator)
        dst_at = torch.randperm(80, generator=generator)[:count] * 25  # 40 in each of the destinations
        src_at = torch.randint(0, 2, (count,), generator=generator) * 1000 + torch.randint(
            0, 976, (count,), generator=generator
        )
        src_ptrs = addresses(*((registered[at // 1000], at % 1000) for at in src_at.tolist()))
        dst_ptrs = addresses(*((registered[2 + at // 1000], at % 1000) for at in dst_at.tolist()))
        for src, dst, size in zip(src_at.tolist(), dst_at.tolist(), sizes.tolist(), strict=True):
            targets[dst : dst + size] = sources[src : src + size]
        vllm_ops.swap_blocks_batch(src_ptrs, dst_ptrs, sizes)
        assert torch.equal(torch.cat(registered[2:]), targets)


def test_one_cache_to_itself(registered):
    cache = registered[0]
    expected = cache.clone()
    expected[500:520], expected[520:540] = cache[:20].clone(), cache[:20].clone()
    vllm_ops.swap_blocks_batch(
        addresses((cache, 0), (cache, 0), (cache, 40)),
        addresses((cache, 500), (cache, 520), (cache, 40)),
        torch.tensor([20, 20, 20]),
    )
    assert torch.equal(cache, expected)


OUTSIDE = torch.zeros(100, dtype=torch.uint8)


@pytest.mark.parametrize(
    "src, dst, size, message",
    [
        ((0, 901), (2, 0), 100, "src_ptrs must name registered memory, 100 bytes from 0x[0-9a-f]+ on are not inside"),
        ((0, -1), (2, 0), 10, "src_ptrs must name registered memory"),
        ((0, 0), (2, 991), 10, "dst_ptrs must name registered memory"),
        ((0, 0), (4, 0), 10, "dst_ptrs must name registered memory"),
        ((4, 0), (2, 0), 10, "src_ptrs must name registered memory"),
        ((0, 0), (2, 0), -1, "sizes must not be negative, got -1"),
        ((0, 0), (2, 495), 10, "dst_ptrs must not overlap"),
        ((2, 505), (3, 0), 10, "src_ptrs and dst_ptrs must not overlap"),
        ((2, 491), (3, 0), 10, "src_ptrs and dst_ptrs must not overlap"),
    ],
)
def test_a_bad_extent_copies_nothing(registered, src, dst, size, message):
    """Beside a good one, from the second source to the bytes 500 to 510 of the first destination."""
    tensors = [*registered, OUTSIDE]
    src_ptrs = addresses((tensors[1], 0), (tensors[src[0]], src[1]))
    dst_ptrs = addresses((tensors[2], 500), (tensors[dst[0]], dst[1]))
    with Unchanged(*tensors), pytest.raises(ValueError, match=message):
        vllm_ops.swap_blocks_batch(src_ptrs, dst_ptrs, torch.tensor([10, size]))


def test_neighbours_of_a_bad_extent_are_as_good_as_it_is_long(registered):
    """Extents that just touch overlap nothing."""
    cache = registered[2]
    expected = cache.clone()
    expected[500:510], expected[510:520], expected[490:500] = cache[480:490], cache[520:530], cache[530:540]
    vllm_ops.swap_blocks_batch(
        addresses((cache, 480), (cache, 520), (cache, 530)),
        addresses((cache, 500), (cache, 510), (cache, 490)),
        torch.tensor([10, 10, 10]),
    )
    assert torch.equal(cache, expected)


@pytest.mark.parametrize("which", range(3))
def test_addresses_are_rows_of_int64_on_the_cpu(registered, which):
    good = [addresses((registered[0], 0)), addresses((registered[2], 0)), torch.tensor([10])]
    name = ("src_ptrs", "dst_ptrs", "sizes")[which]
    for bad in (good[which].int(), good[which][None], good[which].double()):
        arguments = [bad if index == which else tensor for index, tensor in enumerate(good)]
        with Unchanged(*registered), pytest.raises(ValueError, match=f"{name} must be one row of int64 on the CPU"):
            vllm_ops.swap_blocks_batch(*arguments)
    arguments = [tensor.repeat(2) if index == which else tensor for index, tensor in enumerate(good)]
    with Unchanged(*registered), pytest.raises(ValueError, match="src_ptrs, dst_ptrs and sizes must be as many"):
        vllm_ops.swap_blocks_batch(*arguments)


def test_layers_of_one_slab_are_registered_one_by_one():
    """They reach into each other; what the last one ends with is the end."""
    slab = torch.randint(0, 256, (6, 3, 10), dtype=torch.uint8)
    other = torch.zeros(6, 3, 10, dtype=torch.uint8)
    layers = [part[:, layer] for part, layer in itertools.product((slab, other), range(3))]
    vllm_ops.register_caches(layers)
    vllm_ops.register_caches(layers[:1])
    size = torch.tensor([180])
    vllm_ops.swap_blocks_batch(addresses((slab, 0)), addresses((other, 0)), size)
    assert torch.equal(slab, other)
    other.zero_()
    vllm_ops.unregister_caches(layers[1:3])
    with Unchanged(other), pytest.raises(ValueError, match="src_ptrs must name registered memory"):
        vllm_ops.swap_blocks_batch(addresses((slab, 0)), addresses((other, 0)), size)
    vllm_ops.swap_blocks_batch(addresses((slab, 0)), addresses((other, 0)), size - 20)
    vllm_ops.unregister_caches(layers[:1])
    vllm_ops.swap_blocks_batch(addresses((slab, 0)), addresses((other, 0)), size - 20)  # it was registered twice
    with pytest.raises(ValueError, match="tensors must be registered, the one at 0x[0-9a-f]+ is not"):
        vllm_ops.unregister_caches([layers[3], layers[1]])
    vllm_ops.unregister_caches([layers[0], *layers[3:]])
    with pytest.raises(ValueError, match="dst_ptrs must name registered memory|src_ptrs must name registered memory"):
        vllm_ops.swap_blocks_batch(addresses((slab, 0)), addresses((other, 0)), torch.tensor([1]))


def test_only_tensors_are_registered():
    with pytest.raises(TypeError, match="tensors must be torch.Tensor, got int"):
        vllm_ops.register_caches([OUTSIDE, 7])
    with pytest.raises(ValueError, match="tensors must be on the CPU or a CUDA device, got meta"):
        vllm_ops.register_caches([OUTSIDE, torch.zeros(3, device="meta")])
    with pytest.raises(ValueError, match="tensors must be registered"):
        vllm_ops.unregister_caches([OUTSIDE])


@pytest.mark.gpu
@pytest.mark.parametrize("on_null_stream", [False, True])
def test_extents_between_host_and_device(on_null_stream):
    device = torch.randint(0, 256, (64, 4096), dtype=torch.uint8, device="cuda")
    host = torch.zeros(64, 4096, dtype=torch.uint8).pin_memory()
    vllm_ops.register_caches([device, host])
    order = torch.randperm(64)
    sizes = torch.full((64,), 4096)
    stream = torch.cuda.default_stream() if on_null_stream else torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        vllm_ops.swap_blocks_batch(device.data_ptr() + order * 4096, host.data_ptr() + torch.arange(64) * 4096, sizes)
        back = torch.zeros_like(device)
        vllm_ops.register_caches([back])
        vllm_ops.swap_blocks_batch(
            host.data_ptr() + torch.arange(64) * 4096, back.data_ptr() + order * 4096, sizes, True
        )
        stream.synchronize()
    assert torch.equal(host, device.cpu()[order])
    assert torch.equal(back, device)
    vllm_ops.unregister_caches([device, host, back])
