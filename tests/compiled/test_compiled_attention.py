"""Attention as compiled for a GPU, against the reference: on tensor cores, in splits that are merged, quantised."""

from support.attention_cases import BF16, E4M3, E5M2, FP16, FP32, INT8, at_positions, check, make_case
from support.ptx.archs import BOTH, every_case

PAGED, MLA = ("paged", "NHD"), ("mla", "NHD")
WHOLE, SPLIT = 1, 1000  # multiprocessors: as many programs as there are splits are wanted
LATENTS = {"size": 576, "value_size": 512}
ALL = {"window": 30, "softcap": 2.0, "sinks": True}
CASES = {
    "decode": (BOTH, SPLIT, {"queries": None, "dtype": BF16}),
    "decode fp32, all options": ([80], SPLIT, {"queries": None, "dtype": FP32, "size": 46, **ALL}),
    "decode e4m3": (BOTH, SPLIT, {"queries": None, "dtype": E4M3, "query_dtype": BF16, "scales": "head"}),
    "decode e5m2": ([90], SPLIT, {"queries": None, "dtype": E5M2, "query_dtype": BF16, "scales": "tensor"}),
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


def test_rows_at_positions(device, cpu_as_device):
    case, _ = at_positions(make_case([40, 21], [40, 21], dtype=BF16, size=64, heads=1), [[3, 17, 39], [0, 20]])
    check("interpreter", case, capability=device.arch, state=cpu_as_device)
