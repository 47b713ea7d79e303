"""A serving loop of your own: BlockManager, CacheEngine and two operations, without kvpage.serving.

Prompts are computed one by one (the second finds the first's prefix), then all are decoded together, a token a step.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM

from kvpage import BlockManager, CacheConfig, CacheEngine, ModelConfig, ops


@dataclass
class Step:
    """What attention has to know of the sequences that a forward pass computes, packed into one row."""

    engine: CacheEngine
    slots: torch.Tensor  # [num_tokens]: where each new token's K and V go
    block_tables: torch.Tensor  # [num_seqs, max_blocks]
    starts: list[int]  # tokens in the cache before this step
    ends: list[int]  # and after it


def paged_attention(module, query, key, value, attention_mask, scaling=None, step=None, **kwargs):
    """query, key, value: [1, heads, num_tokens, head_size]."""
    cache, layout = step.engine.gpu_cache[module.layer_idx], step.engine.layout
    ops.reshape_and_cache(key[0].transpose(0, 1), value[0].transpose(0, 1), cache, step.slots, layout)
    outputs, row = [], 0
    for table, start, end in zip(step.block_tables, step.starts, step.ends, strict=True):
        keys, values = ops.gather_cache(cache, table[None], torch.tensor([end]), layout)  # [end, heads, head_size]
        queries = query[:, :, row : row + end - start]
        causal = torch.ones(end - start, end, dtype=torch.bool).tril(start)
        keys, values = (
            x.transpose(0, 1).repeat_interleave(module.num_key_value_groups, 0)[None] for x in (keys, values)
        )
        outputs.append(F.scaled_dot_product_attention(queries, keys, values, causal, scale=scaling))
        row += end - start
    return torch.cat(outputs, dim=2).transpose(1, 2), None


def forward(model, manager, engine, tokens: dict[int, list[int]], starts: dict[int, int]) -> dict[int, int]:
    """Computes each sequence's tokens from starts[id] on, commits them, and returns its next token (greedy)."""
    ids, begin, end = list(starts), list(starts.values()), [len(tokens[i]) for i in starts]
    slots, tables = manager.slot_mappings(ids, begin, end), manager.block_tables(ids)
    step = Step(engine, torch.from_numpy(slots), torch.from_numpy(tables), begin, end)
    packed = torch.tensor([[t for i in ids for t in tokens[i][starts[i] :]]])
    positions = torch.cat([torch.arange(b, e) for b, e in zip(begin, end, strict=True)])[None]
    last = torch.tensor([e - b for b, e in zip(begin, end, strict=True)]).cumsum(0) - 1
    with torch.inference_mode():
        logits = model(packed, position_ids=positions, use_cache=False, logits_to_keep=last, step=step).logits[0]
    for i in ids:
        manager.commit(i, tokens[i][starts[i] :])
    return dict(zip(ids, logits.argmax(-1).tolist(), strict=True))


def generate(model, prompts: list[list[int]], max_tokens: int, num_blocks: int = 256) -> list[list[int]]:
    engine = CacheEngine(CacheConfig(num_gpu_blocks=num_blocks), ModelConfig.from_hf(model.config, model.dtype))
    manager = BlockManager(num_blocks, engine.layout.block_size)
    tokens = {i: list(prompt) for i, prompt in enumerate(prompts)}
    for i, prompt in enumerate(prompts):
        cached = manager.allocate(i, prompt).num_cached_tokens
        manager.do_moves(engine.do_move)
        tokens[i].append(forward(model, manager, engine, tokens, {i: cached})[i])
        print(f"prompt {i}: {cached} of {len(prompt)} tokens found in the cache")
    for _ in range(max_tokens - 1):
        manager.append(list(tokens))
        manager.do_moves(engine.do_move)
        for i, token in forward(model, manager, engine, tokens, {i: len(t) - 1 for i, t in tokens.items()}).items():
            tokens[i].append(token)
    return [tokens[i][len(prompt) :] for i, prompt in enumerate(prompts)]


AttentionInterface.register("own_loop", paged_attention)

if __name__ == "__main__":
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=512, hidden_size=128, intermediate_size=256, num_hidden_layers=4,
                         num_attention_heads=8, num_key_value_heads=2, attn_implementation="own_loop")  # fmt: skip
    system = list(range(100, 140))
    print(generate(LlamaForCausalLM(config).eval(), [[*system, 1, 2, 3], [*system, 4], [5]], max_tokens=8))
