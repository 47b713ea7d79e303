"""Transformers' own ways to answer prompts, which several benchmarks have as peers."""

from typing import Any

import torch
import transformers as tf

from kvpage.benchmarks.serving_workloads import BATCHED_TOKENS, BLOCK_SIZE, Prompts, Tokens

PAD = 0


def generation(max_tokens: int, draws: bool = False) -> tf.GenerationConfig:
    """Return the rules of answers: drawn tokens as GRPOTrainer's, or the likeliest ones."""
    sampling = {"temperature": 1.0, "top_p": 1.0, "top_k": 0} if draws else {}
    return tf.GenerationConfig(max_new_tokens=max_tokens, do_sample=draws, pad_token_id=PAD, **sampling)


@torch.no_grad()
def padded(model: Any, prompts: Prompts, config: tf.GenerationConfig, cache: Any = None, num_shared: int = 0) -> Tokens:
    """Answer by one `model.generate` over a batch, padded on the left.

    cache: holds tokens that all prompts begin with; None for a new one. num_shared: those tokens; padding follows them.
    """
    width = max(map(len, prompts))
    gaps = [width - len(prompt) for prompt in prompts]
    rows = [prompt[:num_shared] + [PAD] * gap + prompt[num_shared:] for prompt, gap in zip(prompts, gaps, strict=True)]
    mask = torch.ones(len(prompts), width, dtype=torch.long)
    for row, gap in zip(mask, gaps, strict=True):
        row[num_shared : num_shared + gap] = 0
    tokens = model.generate(torch.tensor(rows), attention_mask=mask, past_key_values=cache, generation_config=config)
    found: Tokens = tokens[:, width:].tolist()
    return found


def has_batches() -> bool:
    """Tell whether this transformers has continuous batching, and say so if not."""
    is_there = hasattr(tf, "ContinuousBatchingConfig")
    if not is_there:
        print(f"generate_batch is left out: transformers {tf.__version__} has no ContinuousBatchingConfig")
    return is_there


def batched(
    model: Any, prompts: Prompts, config: tf.GenerationConfig, batched_tokens: int = BATCHED_TOKENS, **options: Any
) -> list[Any]:
    """Answer by continuous batching over a paged cache, without an end of answers. Return its outputs.

    config: of `generation`; its tokens end no answer. options: of `model.generate_batch`.
    """
    config.eos_token_id = -1
    num_blocks = sum((len(prompt) + config.max_new_tokens) // BLOCK_SIZE + 2 for prompt in prompts)
    batching = tf.ContinuousBatchingConfig(
        page_size=BLOCK_SIZE, num_blocks=num_blocks, max_batch_tokens=batched_tokens, use_async_batching=False
    )
    outputs = model.generate_batch(
        prompts, generation_config=config, continuous_batching_config=batching, **{"warmup": False, **options}
    )
    return list(outputs.values())


def batched_tokens_of(model: Any, prompts: Prompts, config: tf.GenerationConfig) -> Tokens:
    """Return the tokens of `batched`."""
    return [list(output.generated_tokens) for output in batched(model, prompts, config)]
