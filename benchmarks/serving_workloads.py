"""The models and prompts of bench_serving, and how conversations are served turn by turn."""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers as tf

from kvpage import CacheConfig
from kvpage.serving import Engine, EngineConfig

VOCAB, BLOCK_SIZE, BATCHED_TOKENS = 8192, 16, 2048
Prompts = list[list[int]]
Tokens = list[list[int]]


class Shape(NamedTuple):
    """Sizes of a Llama."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int


MODELS = {"small": Shape(8, 512, 1536, 8, 2), "large": Shape(16, 1024, 2816, 16, 4)}
"""small: 33 million parameters. large: 197 million."""
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class Workload(NamedTuple):
    """Conversations, all of which get their next answer at once.

    turns: the new input of each conversation, turn by turn. Its prompt is all that was before, answers included.
    prefix_len: of the prefix that all share; 0 for none.
    """

    name: str
    turns: list[Prompts]
    prefix_len: int = 0

    @property
    def num_answers(self) -> int:
        return sum(map(len, self.turns))


class Served(NamedTuple):
    """The answers of a workload, turn by turn, and the seconds that they took."""

    answers: list[Tokens]
    seconds: float


def make_model(shape: Shape, dtype: torch.dtype, vocab: int, **fields: Any) -> tf.PreTrainedModel:
    """Return a Llama with random weights. fields: of its configuration."""
    sizes = {
        "vocab_size": vocab, "hidden_size": shape.hidden, "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers, "num_attention_heads": shape.heads, "num_key_value_heads": shape.kv_heads,
        "max_position_embeddings": 2048, "initializer_range": 0.05, "pad_token_id": 0, "bos_token_id": None,
        "eos_token_id": None,
    }  # fmt: skip
    torch.manual_seed(0)
    config = tf.LlamaConfig(**sizes | fields)
    return tf.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval().to(dtype)


def config_for(lengths: Iterable[int], **options: Any) -> EngineConfig:
    """Return the config of an engine with room for sequences of these lengths. options: of EngineConfig."""
    return EngineConfig(CacheConfig(BLOCK_SIZE, sum(length // BLOCK_SIZE + 2 for length in lengths)), **options)


def engine_for(model: tf.PreTrainedModel, lengths: Iterable[int], **options: Any) -> Engine:
    """Return an engine with room for sequences of these lengths. options: of EngineConfig."""
    return Engine.from_model(model, config_for(lengths, **options))


def random_prompts(lengths: Iterable[int], vocab: int, seed: int = 0) -> Prompts:
    """Return prompts without a common beginning."""
    rng = np.random.default_rng(seed)
    return [rng.integers(1, vocab, length).tolist() for length in lengths]


def make_workload(name: str, num: int, prefix_len: int, turn_tokens: int, num_turns: int, vocab: int) -> Workload:
    """Args: num: of conversations; of requests, for workloads of one turn."""
    rng = np.random.default_rng(0)

    def tokens(length: int) -> list[int]:
        return rng.integers(1, vocab, length).tolist()

    if name == "multi-turn":
        return Workload(name, [[tokens(turn_tokens) for _ in range(num)] for _ in range(num_turns)])
    if name == "separate":
        return Workload(name, [[tokens(int(rng.integers(32, 256))) for _ in range(num)]])
    prefix = tokens(prefix_len)
    return Workload(name, [[prefix + tokens(int(rng.integers(16, 65))) for _ in range(num)]], prefix_len)


def converse(workload: Workload, answer: Callable[[Prompts], tuple[Tokens, float]]) -> Served:
    """Give each turn's prompts to `answer`, which returns tokens and seconds."""
    prompts: Prompts = [[] for _ in workload.turns[0]]
    answers, seconds = [], 0.0
    for inputs in workload.turns:
        prompts = [before + new for before, new in zip(prompts, inputs, strict=True)]
        tokens, taken = answer(prompts)
        prompts = [before + new for before, new in zip(prompts, tokens, strict=True)]
        answers.append(tokens)
        seconds += taken
    return Served(answers, seconds)


def batches_of(workload: Workload, max_tokens: int) -> list[tuple[int, int]]:
    """Return the least that has to be computed: of each step its tokens, and those of them whose logits are wanted.

    Prompt tokens are computed once for all that share them, and in batches as large as the engine's. Of an answer, its
    last token is computed with the next turn.
    """
    found: list[tuple[int, int]] = []
    for turn, inputs in enumerate(workload.turns):
        num_new = sum(len(tokens) + 1 for tokens in inputs) if turn else num_distinct_prefixes(inputs)
        num_full, rest = divmod(num_new - 1, BATCHED_TOKENS)
        found += [(BATCHED_TOKENS, 0)] * num_full + [(rest + 1, len(inputs))]
        found += [(len(inputs), len(inputs))] * (max_tokens - 1)
    return found


def num_distinct_prefixes(prompts: Prompts) -> int:
    """The nodes of a trie of the prompts: tokens that differ in themselves or in the tokens before them."""
    nodes: dict[tuple[int, int], int] = {}
    for prompt in prompts:
        node = 0
        for token in prompt:
            node = nodes.setdefault((node, token), len(nodes) + 1)
    return len(nodes)
