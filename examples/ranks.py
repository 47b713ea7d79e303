"""One model on several devices, each with its heads. Start it with torchrun, which runs it once for each of them:

pip install 'kvpage[ranks]'
torchrun --nproc-per-node 2 examples/ranks.py Qwen/Qwen3-0.6B
"""

import sys

import torch.distributed as dist
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from kvpage import CacheConfig
from kvpage.serving import Engine, EngineConfig, SamplingParams


def serve(model: PreTrainedModel, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
    """Return the tokens after each prompt on rank 0, and nothing on the others. model: the shard of this rank."""
    cache = CacheConfig(block_size=16, num_gpu_blocks=256)
    config = EngineConfig(cache, tensor_parallel_size=dist.get_world_size())
    if dist.get_rank() != 0:
        Engine.follow(model, config)  # returns when rank 0 closes its engine
        return []
    engine = Engine.from_model(model, config)
    try:
        return [output.token_ids for output in engine.generate(prompts, SamplingParams(max_tokens=max_tokens))]
    finally:
        engine.close()


def main(name: str) -> None:
    """Continue two prompts."""
    model = AutoModelForCausalLM.from_pretrained(name, tp_plan="auto").eval()
    tokenizer = AutoTokenizer.from_pretrained(name)
    for tokens in serve(model, tokenizer(["The capital of France is", "Water boils at"])["input_ids"], max_tokens=16):
        print(tokenizer.decode(tokens))


if __name__ == "__main__":
    main(sys.argv[1])
