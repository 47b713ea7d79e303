"""Attention in Triton on a GPU alone: full sizes, graphs, no waits, addresses beyond 32 bits, the serving loop."""

import pytest
import torch
from support.attention_cases import BF16, E4M3, E5M2, FP16, FP32, HUGE, INT8, check, expected, make_case, on_cuda

from kvpage import ops


@pytest.mark.gpu
@pytest.mark.parametrize("place", [("flash", "NHD"), ("flash", "HND"), ("paged", "NHD"), ("mla", "NHD")], ids=str)
@pytest.mark.parametrize("dtype, query_dtype", [(BF16, BF16), (FP16, FP16), (E4M3, BF16), (INT8, BF16)], ids=str)
@pytest.mark.parametrize("queries", [None, [1, 64, 9]])
def test_gpu_long_sequences(place, dtype, query_dtype, queries):
    """Many splits, whatever the layout; results of full size against fp32."""
    case = make_case([20_000, 70, 4097], queries, place, "packed", dtype, query_dtype, 2, 4, 128, block=16)
    check("cuda", case)


@pytest.mark.gpu
@pytest.mark.parametrize("size", [46, 64, 80, 96, 112, 128, 192, 256, 576])
@pytest.mark.parametrize("dtype, query_dtype", [(FP32, FP32), (BF16, BF16), (BF16, FP32), (E5M2, FP16)], ids=str)
@pytest.mark.parametrize("queries", [None, [300, 1, 77]])
def test_gpu_head_sizes(size, dtype, query_dtype, queries):
    check("cuda", make_case([700, 5, 90], queries, dtype=dtype, query_dtype=query_dtype, size=size, block=16))


@pytest.mark.gpu
def test_gpu_lengths_from_the_host():
    case = on_cuda(make_case([700, 5, 90], [300, 1, 77], block=16))
    want = ops.paged_attention(**case)
    for kind in (list, torch.tensor):
        given = {name: kind(case[name].tolist()) for name in ("seq_lens", "query_lens")}
        assert torch.equal(ops.paged_attention(**{**case, **given}), want)
    mixed = ops.paged_attention(**{**case, "seq_lens": [700, 5, 90]})
    torch.testing.assert_close(mixed, want, rtol=2e-4, atol=2e-4)  # split otherwise: fewer keys are known to be there
    with pytest.raises(ValueError, match="sum up to"):
        ops.paged_attention(**{**case, "query_lens": [300, 1, 76]})


@pytest.mark.gpu
@pytest.mark.parametrize("queries", [None, [3, 1, 40]])
def test_gpu_nothing_is_waited_for(queries):
    case = on_cuda(make_case([700, 5, 90], queries, block=16))
    host = {**case, "seq_lens": [700, 5, 90], "query_lens": queries}
    ops.paged_attention(**case), ops.paged_attention(**host)  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        ops.paged_attention(**case), ops.paged_attention(**host)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.parametrize("queries", [None, [3, 1, 40]])
def test_gpu_a_graph_takes_the_lengths_of_its_replay(queries):
    case = make_case([700, 5, 90], queries, block=16, dtype=BF16, size=64)
    device = on_cuda(case)
    bounds = {"max_query_len": 1 if queries is None else 40, "max_seq_len": 700}
    out = ops.paged_attention(**device, **bounds)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ops.paged_attention(**device, **bounds, out=out)
    for lengths in ([700, 5, 90], [44, 3, 90], [650, 4, 41]):
        device["query"].normal_()
        device["seq_lens"].copy_(torch.tensor(lengths))
        if queries is not None:
            device["query_lens"].copy_(torch.tensor([lengths[0] % 3 + 1, 1, 40]))
        out.fill_(float("nan"))
        graph.replay()
        used = len(out) if queries is None else int(device["query_lens"].sum())
        now = {**case, "query": device["query"][:used].cpu(), "seq_lens": torch.tensor(lengths)}
        now["query_lens"] = None if queries is None else device["query_lens"].cpu()
        torch.testing.assert_close(out[:used].cpu(), expected(now), rtol=1.6e-2, atol=1.6e-2)
        assert out[used:].isnan().all()
    capture = torch.cuda.graph(torch.cuda.CUDAGraph())
    with pytest.raises(ValueError, match="must be on the device while a graph captures"), capture:
        ops.paged_attention(**{**device, "seq_lens": [700, 5, 90]})


@pytest.mark.gpu
@pytest.mark.parametrize("queries", [None, [3, 1, 40]])
def test_gpu_addresses_beyond_32_bits(queries):
    """The blocks lie behind 2^31 elements of the cache."""
    case = on_cuda(make_case([70, 5, 90], queries, block=16, dtype=BF16, size=64))
    layout, num_blocks = case["layout"], 2**31 // (16 * 2 * 64) + 64
    if torch.cuda.mem_get_info()[0] < 2 * num_blocks * layout.block_bytes:
        pytest.skip("needs 16 GiB of the device's memory")
    want = ops.paged_attention(**case)
    used = case["cache"].shape[1]
    cache = torch.empty(layout.shape(num_blocks), dtype=BF16, device="cuda")
    cache[:, -used:] = case["cache"]
    tables = torch.where(case["block_tables"] == HUGE, HUGE, case["block_tables"] + num_blocks - used)
    assert torch.equal(ops.paged_attention(**{**case, "cache": cache, "block_tables": tables.to(torch.int32)}), want)


@pytest.mark.gpu
def test_gpu_the_serving_loop_reads_in_place(monkeypatch):
    """The same tokens as on the CPU, without a call of gather_cache."""
    transformers = pytest.importorskip("transformers")
    from kvpage import CacheConfig
    from kvpage.serving import Engine, EngineConfig, SamplingParams

    config = transformers.LlamaConfig(
        vocab_size=97, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval()
    prompts = [torch.randint(97, (n,)).tolist() for n in (1, 16, 50, 33)]
    found = []
    for device in ("cpu", "cuda"):
        if device == "cuda":
            monkeypatch.delattr(ops, "gather_cache")
        engine = Engine.from_model(model.to(device), EngineConfig(CacheConfig(block_size=16, num_gpu_blocks=64)))
        found.append([output.token_ids for output in engine.generate(prompts, SamplingParams(max_tokens=12))])
    assert found[0] == found[1]
