"""Engines over tiny models with states, and the tokens of model.generate for the same prompts."""

from collections.abc import Sequence

import torch
import transformers as tf
from support.engines import PATIENCE
from support.models import VOCAB
from support.state_loop import POISON

from kvpage import CacheConfig
from kvpage.blocks.manager import BlockManager
from kvpage.serving import Engine, EngineConfig, RequestOutput, SamplingParams, StateConfig

B = 4


def make_engine(model: tf.PreTrainedModel, num_blocks: int = 96, num_host_blocks: int = 0, **fields) -> Engine:
    """An engine whose free slots, and blocks, are poisoned."""
    cache = CacheConfig(B, num_blocks, num_cpu_blocks=num_host_blocks)
    engine = Engine.from_model(model, EngineConfig(cache, **{"max_num_seqs": 4, **PATIENCE, **fields}))
    poison(engine)
    for layer in engine.cache.gpu_cache:
        layer.fill_(torch.nan)
    return engine


def states_for(engine: Engine, num_device: int, num_host: int = 0) -> StateConfig:
    """The budget of so many checkpoints of the engine's model, with their tail blocks."""
    cache = engine.cache
    block_bytes = sum(layer.nbytes for layer in cache.gpu_cache) // cache.num_gpu_blocks
    slot_bytes = engine.states.layout.slot_bytes + block_bytes
    return StateConfig(num_device * slot_bytes, num_host * slot_bytes)


def poison(engine: Engine) -> None:
    """Fill what belongs to nobody with NaN."""
    manager = engine.manager
    assert isinstance(manager, BlockManager)
    manager.states.do_moves(engine.states.do_move)
    engine.states.slots[list(manager.states.space.device.free_slots)] = POISON


def greedy(num_tokens: int, **fields) -> SamplingParams:
    return SamplingParams(max_tokens=num_tokens, temperature=0, ignore_eos=True, **fields)


def own_tokens(model: tf.PreTrainedModel, prompt: Sequence[int], num_tokens: int) -> list[int]:
    """What model.generate gives, greedily."""
    tokens = torch.tensor([list(prompt)])
    with torch.no_grad():
        found = model.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            max_new_tokens=num_tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
    return found[0, len(prompt) :].tolist()


def own_beams(model: tf.PreTrainedModel, prompt: Sequence[int], num_beams: int, num_tokens: int) -> list[list[int]]:
    """What model.generate gives by beam search, all beams."""
    tokens = torch.tensor([list(prompt)])
    found = model.generate(
        tokens,
        attention_mask=torch.ones_like(tokens),
        max_new_tokens=num_tokens,
        num_beams=num_beams,
        num_return_sequences=num_beams,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    return found[:, len(prompt) :].tolist()


def ask(engine: Engine, prompt: Sequence[int], num_tokens: int, **arguments) -> tuple[list[int], int]:
    """Return the tokens, and how many of the prompt were cached. Then what nobody owns is poisoned."""
    engine.add_request(list(prompt), greedy(num_tokens), **arguments)
    (output,) = finished(engine)
    poison(engine)
    return output.samples[0].token_ids, output.num_cached_tokens


def finished(engine: Engine) -> list[RequestOutput]:
    """Return the outputs of all that is queued, once it has ended."""
    outputs = []
    while engine.has_unfinished:
        outputs += [one.output for one in engine.step() if one.output is not None]
    return outputs


def check_nothing_held(engine: Engine) -> None:
    """Each slot is free or a checkpoint, and within the budget."""
    engine.manager.check()
    slots = engine.stats().blocks.slots
    assert slots.num_free_slots + slots.num_checkpoints == slots.num_slots
    assert slots.num_free_host_slots + slots.num_host_checkpoints == slots.num_host_slots


def random_prompt(length: int, seed: int = 0) -> list[int]:
    return torch.randint(1, VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()
