"""The examples of `examples/` do what they say; test_page_examples.py has those of the pages."""

import importlib.util
import re
from pathlib import Path

import pytest
import torch

transformers = pytest.importorskip("transformers")
ROOT = Path(__file__).parents[2]


def load(path: Path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def tiny_llama(attn_implementation: str):
    torch.manual_seed(1)
    config = transformers.LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, initializer_range=0.2, attn_implementation=attn_implementation, pad_token_id=0,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


def generate(model, prompt: list[int], max_tokens: int) -> list[int]:
    out = model.generate(torch.tensor([prompt]), max_new_tokens=max_tokens, do_sample=False, eos_token_id=-1)
    return out[0, len(prompt) :].tolist()


def test_own_loop_gives_the_tokens_of_generate(capsys):
    example = load(ROOT / "examples" / "own_loop.py")
    system = list(range(100, 133))
    prompts = [[*system, 1, 2, 3], [*system, 4], [5], system[:16], system[:17]]
    got = example.generate(tiny_llama("own_loop"), prompts, max_tokens=12)
    assert "32 of 34 tokens found" in capsys.readouterr().out
    assert got == [generate(tiny_llama("eager"), prompt, 12) for prompt in prompts]
    assert len({token for tokens in got for token in tokens}) > 10, "the model repeats itself; the test shows little"


def test_particles_estimate_what_enumeration_finds_and_compute_each_token_once(capsys):
    """Two tokens after a prompt: all pairs that keep the rule can be summed up."""
    from kvpage import CacheConfig
    from kvpage.serving import Engine, EngineConfig, PagedTokenTrie

    example = load(ROOT / "examples" / "particles.py")
    model, prompt = tiny_llama("eager"), [3, 8, 100]
    engine = Engine.from_model(model, EngineConfig(CacheConfig(block_size=4, num_gpu_blocks=512)))
    with PagedTokenTrie(engine) as trie:
        particles, estimate, asked = example.sample(trie, prompt, num_particles=64, num_tokens=2)
    assert engine.stats().num_computed_tokens == 3 + len({tuple(tokens) for tokens in asked[1]})
    for tokens in particles:
        assert tokens[:3] == prompt and tokens[3] % 2 == 1 and tokens[4] % 2 == 0
    odd = range(1, 256, 2)
    with torch.no_grad():
        first = model(torch.tensor([prompt])).logits[0, -1].softmax(-1)
        second = model(torch.tensor([[*prompt, token] for token in odd])).logits[:, -1].softmax(-1)
    exact = (first[1::2] * second[:, 0::2].sum(-1)).sum().log().item()
    assert estimate == pytest.approx(exact, abs=0.15)
    example.main(num_particles=8, num_tokens=6, num_prompt_tokens=40)
    assert re.search(r"tokens computed, in \d+ blocks", capsys.readouterr().out)
