"""GRPO by TRL with kvpage as its generator, over a tiny random Llama: nothing is downloaded.

    pip install 'kvpage[engine]' 'trl>=1.16'
    python examples/grpo.py [--steps 20]

The reward counts even tokens. It grows as the model learns to say them.
"""

import argparse
import tempfile

from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig

from kvpage import CacheConfig
from kvpage.integrations.trl import PagedGRPOTrainer
from kvpage.serving import EngineConfig

VOCAB, END = 200, 199


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer whose words are numbers, each of which is its own id."""
    words = Tokenizer(WordLevel({str(token): token for token in range(VOCAB)}, unk_token="0"))
    words.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, eos_token=str(END), pad_token=str(END))


def make_model() -> LlamaForCausalLM:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=512,
            eos_token_id=END,
            pad_token_id=END,
        )
    )


def share_of_even_tokens(completion_ids: list[list[int]], **kwargs: object) -> list[float]:
    return [sum(token % 2 == 0 for token in tokens) / max(len(tokens), 1) for tokens in completion_ids]


def main(steps: int) -> list[float]:
    """Train. Returns the mean reward of each step."""
    prompts = [" ".join(str((start + index) % 150) for index in range(100)) for start in range(0, 150, 3)]
    with tempfile.TemporaryDirectory() as folder:
        settings = GRPOConfig(
            output_dir=folder, max_steps=steps, per_device_train_batch_size=32, num_generations=8,
            max_completion_length=16, learning_rate=1e-2, logging_steps=1, save_strategy="no", report_to=[],
            use_cpu=True, bf16=False, disable_tqdm=True,
        )  # fmt: skip
        trainer = PagedGRPOTrainer(
            model=make_model(),
            reward_funcs=share_of_even_tokens,
            args=settings,
            train_dataset=Dataset.from_dict({"prompt": prompts}),
            processing_class=make_tokenizer(),
            engine_config=EngineConfig(CacheConfig(block_size=16, num_gpu_blocks=512)),
        )
        trainer.train()
    rewards = [line["reward"] for line in trainer.state.log_history if "reward" in line]
    policy = trainer.rollouts.policy
    assert policy is not None
    stats = policy.engine.stats()
    print(f"reward {rewards[0]:.2f} at first, {rewards[-1]:.2f} at last")
    print(f"{stats.num_computed_tokens} tokens computed; prompts of {stats.num_prompt_tokens} tokens, a group's once")
    return rewards


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20)
    main(parser.parse_args().steps)
