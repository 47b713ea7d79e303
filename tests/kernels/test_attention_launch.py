"""How attention is launched, without a GPU: what serving compiles, and how a batch is cut into launches.

A driver compiles for a GPU and keeps what it was to launch, see test_triton_launch.py.
"""

import os

import pytest
import torch

triton = pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter replaces the compiler", allow_module_level=True)

from support.fake_driver import DEVICE, FakeDriver  # noqa: E402
from triton.runtime import driver  # noqa: E402

from kvpage import CacheLayout  # noqa: E402
from kvpage.benchmarks.bench_launch import LEAST_ADDRESS  # noqa: E402
from kvpage.benchmarks.compiling_driver import SHARED_MEMORY  # noqa: E402
from kvpage.kernels import attention_launch  # noqa: E402
from kvpage.kernels.attention import paged_attention_kernel  # noqa: E402
from kvpage.kernels.attention_launch import Device, DeviceSequences, Rows, paged_attention  # noqa: E402
from kvpage.kernels.attention_merge import merge_splits_kernel  # noqa: E402
from kvpage.kernels.prepared import HAS_DEPENDENT_LAUNCH, PreparedKinds  # noqa: E402
from kvpage.layout.attention import Attention  # noqa: E402
from kvpage.ops import BoundCache, Sequences  # noqa: E402
from kvpage.ops.args.sequences import num_decodes  # noqa: E402

LAYOUT = CacheLayout(16, 8, 128, torch.bfloat16)  # Qwen3-0.6B's
KERNELS = paged_attention_kernel, merge_splits_kernel


@pytest.fixture
def fake(monkeypatch):
    for name in ("_kinds", "_plans"):
        monkeypatch.setattr(attention_launch, name, PreparedKinds())
    fake = FakeDriver()
    driver.set_active(fake)
    for kernel in KERNELS:
        kernel.device_caches.pop(DEVICE, None)
    yield fake
    if torch.cuda.is_available():  # there is no other to go back to where it is not
        driver.reset_active()


def launch(queries, width, max_seq_len, all_decode=False, device="cpu", capability=90):
    """One layer of a step with these queries of each sequence, and block tables of `width` columns.

    On the device "meta", reading a length or a block id would raise.
    """
    key, value = (Rows(view.rows, None) for view in LAYOUT.views(torch.empty(LAYOUT.shape(2), dtype=LAYOUT.dtype)))
    query = torch.empty(sum(queries), 16, 128, dtype=torch.bfloat16)
    lengths = torch.ones(len(queries), dtype=torch.int64, device=device)
    sequences = DeviceSequences(
        torch.zeros(len(queries), width, dtype=torch.int32, device=device),
        lengths,
        None if all_decode else lengths,
        max_seq_len,
        max(queries),
        num_decodes(queries),
    )
    device = Device(torch.zeros(1, dtype=torch.int32), 132, capability, SHARED_MEMORY[capability])
    paged_attention(query, torch.empty_like(query), key, value, sequences, Attention(1.0), device)


def test_serving_compiles_few_kernels(fake):
    """Whatever the batches, the widths of their tables and the lengths."""
    for width in (1, 2, 15, 16, 17, 100, 128):
        for count in (1, 2, 3, 64, 256):
            launch([1] * count, width, 16 * width, all_decode=True)
            launch([1] * count + [count, 513], width, max(16 * width, 513))
            launch([7, 2] + [300] * min(count, 20), width, max(16 * width, 300))
    attention, merge = (len(kernel.device_caches[DEVICE][0]) for kernel in KERNELS)
    assert attention <= 6 and merge <= 3, (attention, merge)


def launches_of(fake, kernel):
    return [call for call in fake.launches if call[0] == kernel.__name__]


def arguments(call, kernel):
    return dict(zip(kernel.arg_names, call[3], strict=False))


def test_a_mixed_batch_is_two_launches(fake):
    """Its decodes have tiles of one token and splits; the prompt has tiles of many."""
    launch([1] * 63 + [1985], 640, 10_000)
    decodes, prompt = (arguments(call, paged_attention_kernel) for call in launches_of(fake, paged_attention_kernel))
    assert decodes["num_tokens"] == decodes["num_seqs"] == 63 and decodes["query_len_ptr"] is None
    assert decodes["A"].TILE_TOKENS == 1 and decodes["A"].TILE_ROWS == 16 and decodes["num_pieces"] == 132
    assert prompt["num_tokens"] == 1985 and prompt["num_seqs"] == 1 and prompt["A"].TILE_TOKENS == 64
    assert prompt["query_ptr"].data_ptr() - decodes["query_ptr"].data_ptr() == 63 * 16 * 128 * 2


@pytest.mark.parametrize("queries", [[5], [1, 1], [9, 1, 1], [2, 3]])
def test_other_batches_are_one_launch(fake, queries):
    launch(queries, 4, 64)
    assert len(launches_of(fake, paged_attention_kernel)) == 1


def test_a_bucket_of_a_graph_is_cut_by_its_bounds_alone(fake):
    """No length is read, and partial results have the size that the bounds ask for."""
    launch([1] * 64, 512, 8192, all_decode=True, device="meta")
    attention, merge = (arguments(launches_of(fake, kernel)[0], kernel) for kernel in KERNELS)
    assert attention["seq_len_ptr"].is_meta and attention["num_pieces"] == 132
    assert attention["num_items"] == merge["num_items"] == 64 + 132
    assert [call[1] for call in fake.launches] == [((64 + 132) * 8, 1, 1), (64 * 16, 1, 1)]
    assert attention["partial_ptr"].shape == (64 + 132, 16, 128) and attention["sum_ptr"].shape == (64 + 132, 16, 2)


@pytest.mark.skipif(not HAS_DEPENDENT_LAUNCH, reason="from Triton 3.4 on")
def test_merging_is_launched_while_attention_runs(fake):
    """Where the device can do it; when a launch is repeated, too. Attention itself waits for what is ahead of it."""
    for capability in (80, 90, 90, 120):
        launch([1] * 4, 512, 8192, all_decode=True, capability=capability)
    assert fake.early == [False, False, False, True, False, True, False, True]
    merges = [arguments(call, merge_splits_kernel)["A"] for call in launches_of(fake, merge_splits_kernel)]
    assert [constants.DEPENDENT for constants in merges] == [False, True, True, True]


def test_an_older_triton_launches_one_after_the_other(fake, monkeypatch):
    monkeypatch.setattr(attention_launch, "HAS_DEPENDENT_LAUNCH", False)
    launch([1] * 4, 512, 8192, all_decode=True)
    assert fake.early == [False, False]
    assert not arguments(launches_of(fake, paged_attention_kernel)[0], paged_attention_kernel)["A"].DEPENDENT


def test_sequences_of_one_query_each_are_no_mixed_batch():
    cache = BoundCache(torch.zeros(LAYOUT.shape(2), dtype=LAYOUT.dtype), LAYOUT)
    cache.is_cuda = True
    tables, lengths = torch.zeros(3, 2, dtype=torch.int32), torch.ones(3, dtype=torch.int64)
    assert Sequences(cache, 3, tables, lengths).num_decodes == 0
    assert Sequences(cache, 5, tables, lengths, [1, 1, 3], max_seq_len=32).num_decodes == 2


def test_a_repeated_launch_is_what_triton_would_launch(fake, monkeypatch):
    """Whatever the batch, the width of its tables and its bounds."""
    batches = [([1] * count, width, 16 * width, True) for count in (1, 64) for width in (1, 40)]
    batches += [([1] * 5 + [count], 40, 640) for count in (2, 300)] + [([7, 30], 4, 64), ([1] * 5 + [9], 50, 800)]
    made = []
    for forgets in (False, False, True):
        fake.launches.clear()
        for batch in batches:
            if forgets:
                for name in ("_kinds", "_plans"):
                    monkeypatch.setattr(attention_launch, name, PreparedKinds())
            launch(*batch)
        made.append([(function, grid, without_addresses(args)) for function, grid, _, args in fake.launches])
    assert made[0] == made[1] == made[2] and len(made[0]) > len(batches)


def without_addresses(args):
    """Each launch here is on memory of its own."""
    places = [0 if arg is None else arg for arg in args if not isinstance(arg, torch.Tensor)]
    return [place for place in places if not (isinstance(place, int) and place >= LEAST_ADDRESS)]
