"""Cases of attention over blocks: random ones with poison all around, run by a kernel, and the reference's answer.

The interpreter runs the kernels on the CPU: after the same function as on a GPU, with lengths "on the device", which is
the CPU.
"""

import itertools

import torch

from kvpage import CacheLayout, KVScales, ops
from kvpage.ops import reference
from kvpage.ops.cuda import attention as attention_ops_cuda

HUGE = 2**31 - 1
FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
E4M3, E5M2, INT8 = torch.float8_e4m3fn, torch.float8_e5m2, torch.int8
OPTIONS = ("scale", "sliding_window", "softcap", "sinks", "query_positions")


def attend_as_on_a_device(case, out, cache="cache"):
    """What ops.paged_attention does for CUDA devices, on tensors of the CPU."""
    held = ops.BoundCache(case[cache], case["layout"], case["scales"])
    held.is_cuda = True
    query, bounds = case["query"], (case.get("max_query_len"), case.get("max_seq_len"))
    given = case["query_lens"]
    plan = case.get("shared")
    sequences = ops.Sequences(held, len(query), case["block_tables"], case["seq_lens"], given, *bounds, shared=plan)
    options = {name: case.get(name) for name in OPTIONS}
    options["scale"] = query.shape[2] ** -0.5 if options["scale"] is None else options["scale"]
    attention_ops_cuda.attend(query, held, sequences, ops.Attention(**options, value_size=out.shape[2]), out)


def attend(where, case, out=None, multiprocessors=4, capability=90, state=None):
    """The operation on `where`: (output, whether a block id was reported)."""
    case = {name: value for name, value in case.items() if name not in ("clean",)}
    if where == "cuda":
        moved = {name: value.cuda() if isinstance(value, torch.Tensor) else value for name, value in case.items()}
        if case["scales"] is not None:
            moved["scales"] = KVScales(case["scales"].key.cuda(), case["scales"].value.cuda())
        cache = case["layout"].allocate(case["cache"].shape[case["layout"].block_dim], 2, torch.device("cuda"))[1]
        cache.view(torch.uint8).copy_(case["cache"].view(torch.uint8))
        got = ops.paged_attention(**{**moved, "cache": cache}, out=None if out is None else out)
        try:
            ops.check_device()
        except ValueError as error:
            assert "block_tables held a block id out of range" in str(error)
            return got.cpu(), True
        return got.cpu(), False
    from kvpage.benchmarks.compiling_driver import SHARED_MEMORY

    state["facts"] = (multiprocessors, capability, SHARED_MEMORY[capability])
    query, value_size = case["query"], case["value_size"]
    if out is None:
        out = query.new_full((*query.shape[:2], value_size), float("nan"))
    attend_as_on_a_device(case, out)
    reported = state["error"].item()
    state["error"].zero_()
    assert reported in (0, 2)
    return out, reported == 2


def make_case(
    seq_lens,
    query_lens,
    place=("flash", "NHD"),
    layer_layout="separate",
    dtype=FP32,
    query_dtype=None,
    heads=2,
    group=3,
    size=20,
    key_size=None,
    value_size=None,
    block=4,
    window=None,
    softcap=None,
    sinks=False,
    scales=None,
    index=torch.int32,
    forks=None,
):
    """Random queries, and a cache that is NaN wherever no visible token lies; unused table entries are huge.

    forks: {sequence: (an earlier one, how many of its first tokens are the same blocks)}; whole blocks, with which all
    tokens are there. "clean" is a cache of the same tokens with zeros in place of the rest. query_lens None: one each.
    """
    backend, kv_layout = place
    heads = 1 if backend == "mla" else heads
    layout = CacheLayout(block, heads, size, dtype, backend, kv_layout, layer_layout)
    key_size, value_size = key_size or size, value_size or size
    counts = [1] * len(seq_lens) if query_lens is None else query_lens
    width = max(-(-n // block) for n in seq_lens) + 1
    num_blocks = sum(-(-n // block) for n in seq_lens) + 2
    cache, clean = (layout.allocate(num_blocks, 2, torch.device("cpu"))[1] for _ in range(2))
    cache.view(torch.uint8).fill_(255)
    tables = torch.full((len(seq_lens), width), HUGE, dtype=torch.int32)
    free = torch.randperm(num_blocks).tolist()
    rows_dtype = dtype if not layout.is_quantized else FP32
    given = {None: None, "tensor": KVScales.of(0.5, 2.0)}.get(scales) if scales != "head" else None
    if scales == "head":
        given = KVScales(torch.rand(heads) + 0.5, torch.rand(heads) + 0.5)
    for seq, (table, length, queries) in enumerate(zip(tables, seq_lens, counts, strict=True)):
        parent, num_same = (forks or {}).get(seq, (seq, 0))
        low = max(0, length - queries - window + 1) if window and not forks else 0
        table[: num_same // block] = tables[parent, : num_same // block]
        tokens = torch.arange(max(low, num_same), length)
        for number in (tokens // block).unique().tolist():
            table[number] = free.pop()
        slots = table.long()[tokens // block] * block + tokens % block
        key = torch.randn(len(tokens), heads, key_size).to(rows_dtype)
        value = None if backend == "mla" else torch.randn(len(tokens), heads, value_size).to(rows_dtype)
        for each in (cache, clean):
            ops.reshape_and_cache(key, value, each, slots, layout, given)
    query_dtype = query_dtype or rows_dtype
    return {
        "query": torch.randn(sum(counts), heads * group, key_size).to(query_dtype),
        "cache": cache,
        "clean": clean,
        "block_tables": tables,
        "seq_lens": torch.tensor(seq_lens, dtype=index),
        "query_lens": None if query_lens is None else torch.tensor(query_lens, dtype=index),
        "layout": layout,
        "value_size": value_size,
        "sliding_window": window,
        "softcap": softcap,
        "sinks": torch.randn(heads * group) * 2 if sinks else None,
        "scales": given,
    }


def expected(case):
    num_blocks = case["clean"].shape[case["layout"].block_dim]
    skipped = ("clean", "max_query_len", "max_seq_len", "shared")
    clean = {name: value for name, value in case.items() if name not in skipped}
    return reference.paged_attention(
        **{**clean, "cache": case["clean"], "block_tables": case["block_tables"].clamp(0, num_blocks - 1)}
    )


def check(where, case, **how):
    got, reported = attend(where, case, **how)
    want = expected(case)
    assert not reported and got.dtype == case["query"].dtype and got.shape == want.shape
    tolerance = {FP32: 2e-5, BF16: 1.6e-2, FP16: 2e-3}[got.dtype]
    if where == "cuda" and got.dtype == FP32:
        tolerance = 2e-4
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)
    return got


def at_positions(case, at):
    """The case, one whose queries are all tokens of its sequences, for those at some positions alone."""
    first = [0, *itertools.accumulate(case["seq_lens"].tolist())]
    rows = [begin + position for begin, some in zip(first, at, strict=False) for position in some]
    positions = torch.tensor([position for some in at for position in some])
    some = {"query": case["query"][rows], "query_positions": positions}
    return {**case, **some, "query_lens": torch.tensor([len(some) for some in at])}, rows


def on_cuda(case):
    """The case on the device: arguments of ops.paged_attention."""
    moved = {name: x.cuda() if isinstance(x, torch.Tensor) else x for name, x in case.items() if name != "clean"}
    cache = case["layout"].allocate(case["cache"].shape[case["layout"].block_dim], 2, torch.device("cuda"))[1]
    cache.view(torch.uint8).copy_(case["cache"].view(torch.uint8))
    scales = case["scales"] and KVScales(case["scales"].key.cuda(), case["scales"].value.cuda())
    return {**moved, "cache": cache, "scales": scales}
