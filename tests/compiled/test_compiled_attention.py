"""Attention as compiled for a GPU, against the reference: on tensor cores, in splits that are merged, quantised."""

import pytest
import torch
from support.attention_cases import BF16, E4M3, E5M2, FP16, FP32, INT8, at_positions, attend, check, make_case
from support.ptx.archs import BOTH, every_case

from kvpage import CacheLayout, ops

PAGED, MLA = ("paged", "NHD"), ("mla", "NHD")
WHOLE, SPLIT = 1, 1000  # multiprocessors: as many programs as there are splits are wanted
LATENTS = {"size": 576, "value_size": 512}
ALL = {"window": 30, "softcap": 2.0, "sinks": True}
CASES = {
    "decode": (BOTH, SPLIT, {"queries": None, "dtype": BF16}),
    "decode fp32, all options": ([80], SPLIT, {"queries": None, "dtype": FP32, "size": 46, **ALL}),
    "decode e4m3": (BOTH, SPLIT, {"queries": None, "dtype": E4M3, "query_dtype": BF16, "scales": "head"}),
    "decode e5m2": ([90], SPLIT, {"queries": None, "dtype": E5M2, "query_dtype": BF16, "scales": "tensor"}),
    "decode int8": (BOTH, SPLIT, {"queries": None, "dtype": INT8, "query_dtype": BF16}),
    "decode int8, fp16": ([90], SPLIT, {"queries": None, "dtype": INT8, "query_dtype": FP16}),
    "decode paged int8": ([80], SPLIT, {"queries": None, "dtype": INT8, "query_dtype": BF16, "place": PAGED}),
    "prefill": ([90], WHOLE, {"queries": [33, 5], "dtype": BF16, "size": 128}),
    "prefill, all options": (BOTH, WHOLE, {"queries": [70, 5], "dtype": BF16, **ALL}),  # the diagonal meets each key
    "prefill e4m3": (BOTH, WHOLE, {"queries": [33, 5], "dtype": E4M3, "query_dtype": BF16, "scales": "head"}),
    "prefill e5m2": ([80], WHOLE, {"queries": [33, 5], "dtype": E5M2, "query_dtype": FP16, "scales": "tensor"}),
    "prefill int8": ([90], WHOLE, {"queries": [33, 5], "dtype": INT8, "query_dtype": FP16}),
    "latents e4m3": ([90], SPLIT, {"queries": None, "dtype": E4M3, "query_dtype": BF16, "place": MLA, "group": 16,
                                   **LATENTS}),
    "latents": (BOTH, SPLIT, {"queries": None, "dtype": BF16, "place": MLA, "group": 16, **LATENTS}),
}  # fmt: skip


def opcodes_of(kernel):
    return {instruction.opcode for instruction in kernel.entry.instructions}


@every_case("multiprocessors, options", CASES)
def test_attention(device, cpu_as_device, multiprocessors, options):
    options = {"size": 64, "heads": 1, "group": 4, "block": 16, **options}
    case = make_case([90 if multiprocessors == WHOLE else 500, 37], options.pop("queries"), **options)
    case["query"][-1] *= 30  # its largest scores stand far above the others
    before = device.launches["merge_splits_kernel"]
    check("interpreter", case, multiprocessors=multiprocessors, capability=device.arch, state=cpu_as_device)
    assert device.launches["merge_splits_kernel"] - before == (multiprocessors == SPLIT)
    by_groups = device.arch == 90 and multiprocessors == WHOLE
    assert ("wgmma" in opcodes_of(device.last["paged_attention_kernel"])) == by_groups


@pytest.mark.parametrize("query_dtype", [BF16, FP16], ids=str)
def test_every_byte_is_read_exactly(device, cpu_as_device, query_dtype):
    """With one key of scale 1 the output is its value: all 256 in, the same numbers out, of both halves of a pair."""
    layout = CacheLayout(1, 4, 128, INT8)
    cache = layout.allocate(1, 1, torch.device("cpu"))[0]
    values = torch.arange(256).repeat(2).view(2, 256)
    values = torch.stack([values[0], values[1].roll(1)]).view(1, 1, 4, 128).to(torch.uint8).view(INT8)
    for view in layout.views(cache):
        view.rows.copy_(values.view(view.rows.shape))
        view.scales.fill_(1.0)
    case = {"query": torch.zeros(1, 4, 128, dtype=query_dtype), "cache": cache, "layout": layout, "value_size": 128}
    case |= {"block_tables": torch.zeros(1, 1, dtype=torch.int32), "seq_lens": torch.ones(1, dtype=torch.int32)}
    case |= {"query_lens": None, "scales": None}
    got, _ = attend("interpreter", case, capability=device.arch, state=cpu_as_device)
    assert torch.equal(got, values.to(query_dtype).view(1, 4, 128))


def test_rows_at_positions(device, cpu_as_device):
    case, _ = at_positions(make_case([40, 21], [40, 21], dtype=BF16, size=64, heads=1), [[3, 17, 39], [0, 20]])
    check("interpreter", case, capability=device.arch, state=cpu_as_device)


SHARED = {
    "plain": (BOTH, {"dtype": BF16}),
    "all options": ([90], {"dtype": BF16, "window": 100, "softcap": 2.0, "sinks": True}),
    "e4m3": ([80], {"dtype": E4M3, "query_dtype": BF16, "scales": "head"}),
    "latents": ([90], {"dtype": BF16, "place": MLA, "group": 16, **LATENTS}),
}


@every_case("options", SHARED)
def test_keys_that_sequences_share(device, cpu_as_device, options):
    """Two groups, one within the other, and a sequence in none."""
    options = {"size": 64, "heads": 1, "group": 4, "block": 16, **options}
    case = make_case([290, 20, 270, 140, 300], None, forks={2: (0, 256), 3: (0, 128), 4: (0, 256)}, **options)
    case["shared"] = ops.shared_prefixes(case["block_tables"], case["seq_lens"], 16, least_saved=1)
    before = device.launches["merge_shared_kernel"]
    check("interpreter", case, multiprocessors=WHOLE, capability=device.arch, state=cpu_as_device)
    assert device.launches["merge_shared_kernel"] == before + 1
