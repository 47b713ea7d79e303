"""Sequential Monte Carlo: 64 continuations of one prompt, held to a rule that the model does not know.

The rule: after an even token an odd one, and the other way round. Each particle draws its next token from what the
model allows under the rule; its weight takes up how much of the model's probability the rule left. When few particles
carry most of the weight, they are drawn again by weight: the heavy ones are forked, the light ones end. The mean weight
estimates the probability that the model keeps the rule by itself.

PagedTokenTrie computes each token of each distinct particle once, and particles with a common past share its blocks.
"""

import math

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from kvpage import CacheConfig
from kvpage.serving import Engine, EngineConfig, PagedTokenTrie


def allowed(tokens: list[int], vocab_size: int) -> torch.Tensor:
    """Which tokens the rule lets follow: bool [vocab_size]."""
    return torch.arange(vocab_size) % 2 != tokens[-1] % 2


def resample(log_weights: torch.Tensor, generator: torch.Generator) -> list[int]:
    """Systematic resampling: each particle about as often as its share of the weight."""
    shares = log_weights.softmax(0).cumsum(0)
    points = (torch.arange(len(shares)) + torch.rand(1, generator=generator)) / len(shares)
    return torch.searchsorted(shares, points).clamp(max=len(shares) - 1).tolist()


def sample(trie: PagedTokenTrie, prompt: list[int], num_particles: int, num_tokens: int, seed: int = 0):
    """The particles, the estimate of the log-probability of the rule, and what was asked for along the way."""
    generator = torch.Generator().manual_seed(seed)
    particles, log_weights, asked = [list(prompt)] * num_particles, torch.zeros(num_particles), []
    for _ in range(num_tokens):
        asked.append(particles)
        logprobs = trie.next_token_logprobs(particles)
        mask = torch.stack([allowed(tokens, logprobs.shape[1]) for tokens in particles])
        logprobs = logprobs.masked_fill(~mask, -math.inf)
        log_weights = log_weights + logprobs.logsumexp(1)
        chosen = torch.multinomial(logprobs.softmax(1), 1, generator=generator).squeeze(1).tolist()
        particles = [[*tokens, token] for tokens, token in zip(particles, chosen, strict=True)]
        if 1 / log_weights.softmax(0).square().sum() < num_particles / 2:  # the effective number of particles
            particles = [particles[index] for index in resample(log_weights, generator)]
            log_weights = torch.full_like(log_weights, log_weights.logsumexp(0).item() - math.log(num_particles))
    return particles, log_weights.logsumexp(0).item() - math.log(num_particles), asked


def report(engine: Engine, asked: list[list[list[int]]], num_blocks: int) -> None:
    """What was computed, and what it would have been."""
    again = sum(len(tokens) for particles in asked for tokens in particles)
    apart = sum(len(tokens) for tokens in asked[0]) + sum(map(len, asked[1:]))
    computed = engine.stats().num_computed_tokens
    blocks_apart = sum(-(-len(tokens) // engine.manager.block_size) for tokens in asked[-1])
    print(f"{computed:8,} tokens computed, in {num_blocks} blocks")
    print(f"{apart:8,} with a cache for each particle ({apart / computed:.1f} times), in {blocks_apart} blocks")
    print(f"{again:8,} with no cache ({again / computed:.1f} times)")


def main(num_particles: int = 64, num_tokens: int = 32, num_prompt_tokens: int = 200) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=512, hidden_size=128, intermediate_size=256, num_hidden_layers=4,
                         num_attention_heads=8, num_key_value_heads=2, initializer_range=0.1)  # fmt: skip
    engine = Engine.from_model(
        LlamaForCausalLM(config).eval(), EngineConfig(CacheConfig(block_size=16, num_gpu_blocks=1024))
    )
    prompt = torch.randint(0, 512, (num_prompt_tokens,)).tolist()
    with PagedTokenTrie(engine, max_branches=num_particles) as trie:
        particles, log_probability, asked = sample(trie, prompt, num_particles, num_tokens)
        num_blocks = engine.stats().num_used_blocks
    distinct = len({tuple(tokens) for tokens in particles})
    print(f"log-probability of the rule over {num_tokens} tokens: {log_probability:.2f}; {distinct} particles differ")
    report(engine, asked, num_blocks)


if __name__ == "__main__":
    main()
