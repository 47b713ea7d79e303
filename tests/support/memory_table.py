"""python tests/support/memory_table.py --write docs/notes/memory.md: the memory of context, by models' configs alone.

Shapes are those of released models. Weights do not matter, so there are none; the state of a model is measured on four
of its layers, which are tiny but for the heads of the state.
"""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers as tf

from kvpage import CacheConfig
from kvpage.layout.config import ModelConfig, ParallelConfig, cache_block_bytes
from kvpage.serving import EngineConfig
from kvpage.serving.assembly.memory_split import checkpoint_share, split_windows
from kvpage.serving.assembly.window_groups import num_blocks_of_sequence, short_windows
from kvpage.serving.model.states.model_states import ModelStates

B = 16
MEMORY = 16 << 30
LIMITS = EngineConfig()
BEGIN, END = "<!-- memory: written by tests/support/memory_table.py -->\n", "<!-- end of memory -->\n"
HEAD = """\
| model | a token, one table | as chosen | once a sequence | tokens in 16 GiB, one table | as chosen |
|---|---|---|---|---|---|
"""


@dataclass(frozen=True, slots=True)
class ContextMemory:
    """Bytes of the context of a model in bf16.

    table_bytes: of a token in all layers with K and V. token_bytes: of a token in the layers that keep all tokens.
    sequence_bytes: of the windows of a sequence, or of its state. num_table_tokens, num_tokens: in MEMORY, of one table
    and as an engine splits it, beside the states of running sequences.
    """

    table_bytes: int
    token_bytes: int
    sequence_bytes: int
    num_table_tokens: int
    num_tokens: int

    @classmethod
    def of(cls, config: tf.PretrainedConfig, state_bytes: int = 0) -> "ContextMemory":
        """Return the memory of a model's config. state_bytes: of one state."""
        shape = ModelConfig.from_hf(config, torch.bfloat16)
        words = getattr(config, "layer_types", None) or ()
        windows = {i: config.sliding_window for i, word in enumerate(words) if word == "sliding_attention"}
        max_model_len = config.max_position_embeddings
        short = short_windows(windows, max_model_len)
        full = [layer for layer in shape.attention_layers(ParallelConfig()) if layer not in short]
        table, block, window = (block_bytes(part) for part in (shape, *map(shape.with_caches_of, (full, short))))
        num_table = MEMORY // table * B
        if state_bytes:
            share = checkpoint_share(MEMORY, block, state_bytes + block, LIMITS.max_num_seqs)
            return cls(table // B, block // B, state_bytes, num_table, (MEMORY - share) // block * B)
        num_each = num_blocks_of_sequence(max(short.values(), default=0), B, max_model_len)
        step = LIMITS.max_num_batched_tokens // B
        split = split_windows(MEMORY, block, window, num_each, LIMITS.max_num_seqs, step) if short else None
        if split is None:
            return cls(table // B, table // B, 0, num_table, num_table)
        return cls(table // B, block // B, num_each * window, num_table, split.num_blocks * B)

    def row(self, name: str) -> str:
        """The row of the table."""
        once = f"{self.sequence_bytes / 2**20:.1f} MiB" if self.sequence_bytes else "-"
        tokens = (f"{number:,}" for number in (self.num_table_tokens, self.num_tokens))
        sizes = (f"{number / 2**10:g} KiB" for number in (self.table_bytes, self.token_bytes))
        return f"| {' | '.join((name, *sizes, once, *tokens))} |\n"


def block_bytes(shape: ModelConfig) -> int:
    return cache_block_bytes(CacheConfig(B), shape, ParallelConfig())


def gemma_3(num_layers: int, num_kv_heads: int, head_dim: int) -> ContextMemory:
    kinds = ["full_attention" if layer % 6 == 5 else "sliding_attention" for layer in range(num_layers)]
    return ContextMemory.of(
        tf.Gemma3TextConfig(
            num_hidden_layers=num_layers, num_key_value_heads=num_kv_heads, head_dim=head_dim, sliding_window=1024,
            layer_types=kinds, max_position_embeddings=131072,
        )
    )  # fmt: skip


def gemma_2(num_layers: int) -> ContextMemory:
    fields: dict[str, Any] = {"num_key_value_heads": 16, "head_dim": 128, "sliding_window": 4096}
    return ContextMemory.of(tf.Gemma2Config(num_hidden_layers=num_layers, **fields))


def gpt_oss(num_layers: int) -> ContextMemory:
    return ContextMemory.of(
        tf.GptOssConfig(num_hidden_layers=num_layers, num_key_value_heads=8, head_dim=64, sliding_window=128)
    )


def qwen3_next(num_layers: int) -> ContextMemory:
    """Three of four layers have a state: 16 heads of K and 32 of V, of 128 elements."""
    fields: dict[str, Any] = {"num_key_value_heads": 2, "head_dim": 256, "linear_num_key_heads": 16}
    fields |= {"linear_num_value_heads": 32, "linear_key_head_dim": 128, "linear_value_head_dim": 128}
    tiny: dict[str, Any] = dict.fromkeys(("hidden_size", "intermediate_size", "vocab_size"), 64)
    tiny |= dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 16)
    tiny |= {"num_attention_heads": 2, "num_experts": 2, "num_experts_per_tok": 1}
    four_layers = tf.Qwen3NextConfig(num_hidden_layers=4, **fields, **tiny)
    model = tf.AutoModelForCausalLM.from_config(four_layers).bfloat16().eval()
    state_bytes = ModelStates.of_model(model).layout.slot_bytes * num_layers // 4
    return ContextMemory.of(tf.Qwen3NextConfig(num_hidden_layers=num_layers, **fields), state_bytes)


def llama(num_layers: int) -> ContextMemory:
    return ContextMemory.of(
        tf.LlamaConfig(
            num_hidden_layers=num_layers, hidden_size=4096, num_attention_heads=32, num_key_value_heads=8,
            max_position_embeddings=131072,
        )
    )  # fmt: skip


MODELS: dict[str, Callable[[], ContextMemory]] = {
    "Gemma 3 4B": lambda: gemma_3(34, 4, 256),
    "Gemma 3 27B": lambda: gemma_3(62, 16, 128),
    "Gemma 2 27B": lambda: gemma_2(46),
    "gpt-oss 20B": lambda: gpt_oss(24),
    "gpt-oss 120B": lambda: gpt_oss(36),
    "Qwen3-Next 80B": lambda: qwen3_next(48),
    "Llama 3.1 8B": lambda: llama(32),
}


def table() -> str:
    """Return the table with its rows."""
    return HEAD + "".join(make().row(name) for name, make in MODELS.items())


def table_of(page: str) -> str:
    """Return the table of a page."""
    return page.partition(BEGIN)[2].partition(END)[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path, metavar="FILE", required=True, help="the page")
    path = parser.parse_args().write
    page = path.read_text()
    path.write_text(page.replace(BEGIN + table_of(page) + END, BEGIN + table() + END))


if __name__ == "__main__":
    main()
