"""The peers of bench_paged_attention over small cases on the CPU: libraries are fakes, vLLM's is, too."""

import sys
import types

import pytest

torch = pytest.importorskip("torch")

from support.fake_libraries import Fakes  # noqa: E402

from kvpage.benchmarks import attention_peers  # noqa: E402
from kvpage.benchmarks.fake_cuda import fake_cuda  # noqa: E402
from kvpage.benchmarks.paged_case import BF16, E4M3, INT8, Case, Model  # noqa: E402
from kvpage.ops.cuda.libraries import choice, flashinfer  # noqa: E402

HEADS, LATENTS = Model("flash", 2, 4, 64, 64, 16), Model("mla", 1, 4, 576, 512, 64)


@pytest.fixture
def fakes(monkeypatch):
    made = Fakes()
    made.install(monkeypatch)
    monkeypatch.setattr(choice, "capability_of", lambda device: 90)
    monkeypatch.setattr(flashinfer, "WORKSPACE_BYTES", 64)
    vllm = types.ModuleType("vllm.vllm_flash_attn")
    vllm.flash_attn_varlen_func = lambda q, k, v, *, max_seqlen_q, cu_seqlens_q, max_seqlen_k, seqused_k, softmax_scale, causal, block_table: made.with_kvcache_3(  # noqa: E501
        q, k, v, cache_seqlens=seqused_k, page_table=block_table, cu_seqlens_q=cu_seqlens_q, max_seqlen_q=max_seqlen_q,
        softmax_scale=softmax_scale, causal=causal,
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "vllm", types.ModuleType("vllm"))
    monkeypatch.setitem(sys.modules, "vllm.vllm_flash_attn", vllm)
    return made


@pytest.mark.parametrize("num_queries", [1, 33])
def test_each_peer_is_compared_with_the_reference(fakes, num_queries):
    case = Case(HEADS, BF16, 2, 33, num_queries, "cpu")
    found = {name: call().shape for name, call in attention_peers.peers_of(case)}
    assert found == dict.fromkeys(("flash_attn_3", "flashinfer", "flash_attn", "vllm"), case.query.shape)
    latents = Case(LATENTS, BF16, 2, 70, num_queries, "cpu")
    names = [name for name, _ in attention_peers.peers_of(latents)]
    assert names == (["flash_mla", "flashinfer"] if num_queries == 1 else ["flashinfer"])


def test_a_peer_that_computes_something_else_is_left_out_with_a_word(fakes, monkeypatch, capsys):
    monkeypatch.setattr(fakes.modules["flash_attn_interface"], "flash_attn_with_kvcache", lambda q, *a, **k: 0 * q)
    names = [name for name, _ in attention_peers.peers_of(Case(HEADS, BF16, 2, 33, 1, "cpu"))]
    assert "flash_attn_3" not in names and "flashinfer" in names
    assert "flash_attn_3 is left out: Tensor-likes are not close" in capsys.readouterr().out


def test_nothing_installed_gives_no_peers(monkeypatch, capsys):
    monkeypatch.setattr(choice, "_is_installed", lambda rules: False)
    monkeypatch.setitem(sys.modules, "vllm.vllm_flash_attn", None)
    assert list(attention_peers.peers_of(Case(HEADS, BF16, 2, 33, 1, "cpu"))) == []
    assert capsys.readouterr().out == ""


def test_targets_are_of_decoding_many_bytes():
    def target(model, dtype, num_queries=1, num_bytes=1 << 28):
        return attention_peers.target_of(Case(model, dtype, 1, 33, num_queries, "cpu"), num_bytes)

    assert (target(HEADS, BF16), target(HEADS, E4M3), target(HEADS, INT8)) == (0.85, 0.7, None)
    assert (target(LATENTS, BF16), target(LATENTS._replace(num_heads=128), BF16)) == (0.5, 0.7)
    assert target(HEADS, BF16, 33) is None and target(HEADS, BF16, 1, (1 << 28) - 1) is None


def test_a_peer_that_is_left_out_is_not_even_made(fakes, monkeypatch):
    """Some compile for long when they are made."""
    asked = []
    monkeypatch.setattr(attention_peers, "library_call", lambda case, rules: asked.append(rules.name))
    without = ["flashinfer", "vllm", "cudnn"]
    assert list(attention_peers.peers_of(Case(HEADS, BF16, 1, 33, 1, "cpu"), without)) == []
    assert "flash_attn" in asked and "flashinfer" not in asked


def test_keys_and_values_of_sdpa_are_random():
    """A kernel is faster over zeros."""
    with fake_cuda():
        call = Case(HEADS, BF16, 1, 33, 1).contiguous()
        assert call().abs().min() > 0 and Case(HEADS, BF16, 1, 33, 5).contiguous() is None
