"""What does `same_bits` cost? CPU seconds with it over those without it, of an engine and of `generate` over blocks.

    prompt          one prompt of --prompt-tokens, and its first token
    decode          steps of --seqs sequences, a token each, after short prompts; and of a single one
    generate        `model.generate` over a KVPageCachePool: rows of such prompts, and --tokens new ones

Models have random weights, four layers, and a fixed length of answers. Nothing is found in a cache. Both ways take
turns, and each turn gives a ratio: medians with their quartiles. Beside `generate` over blocks stands `generate` as it
is. The bound is 1: the same engine without the option.

Each row's tokens are computed once more, cold and alone, and compared, before anything is timed.
"""

import functools
import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import transformers as tf
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from kvpage import CacheConfig
from kvpage.benchmarks.cells import Row, shown
from kvpage.benchmarks.figure import Figure, in_turns, result
from kvpage.benchmarks.pictures import grouped
from kvpage.benchmarks.script import finish, option, parse
from kvpage.benchmarks.serving_workloads import DTYPES, random_prompts
from kvpage.benchmarks.state_families import Shape, make_family
from kvpage.serving import Engine, EngineConfig, KVPageCache, KVPageCachePool, SamplingParams

BLOCK_SIZE, VOCAB, LAYERS, SHORT = 16, 4096, 4, 16
EXPERTS = {"num_experts_per_tok": 2, "intermediate_size": 512}
FIELDS: dict[str, dict[str, Any]] = {
    "llama": {"hidden_size": 512, "intermediate_size": 1536},
    "gemma3_text": {"hidden_size": 512, "intermediate_size": 1536},
    "mixtral": {"hidden_size": 256, "num_local_experts": 8, **EXPERTS},
    "qwen3_moe": {"hidden_size": 256, "num_experts": 8, "moe_intermediate_size": 512, **EXPERTS},
    "gpt_oss": {"hidden_size": 256, "num_local_experts": 8, **EXPERTS},
}
OF_STATES = {"qwen3_next": 512, "bamba": 512}
"""Families whose layers keep states, and how wide they are."""
KINDS = (*FIELDS, *OF_STATES)
TASKS = ("prompt", "decode many", "decode one", "generate many", "generate one")
COLUMNS = "{model:<12} {dtype} {task:<14} {without ms:>22.1f} {with ms:>22.1f} {plain ms:>22.1f} {cost:>20.3f}"


def make_model(kind: str, dtype: torch.dtype) -> tf.PreTrainedModel:
    model: Any  # whose `to` transformers annotates as another function
    if kind in OF_STATES:
        model = make_family(kind, Shape(OF_STATES[kind], LAYERS))
    else:
        fields = FIELDS[kind]
        num_heads = fields["hidden_size"] // 64
        sizes = {
            "vocab_size": VOCAB, "num_hidden_layers": LAYERS, "num_attention_heads": num_heads, "head_dim": 64,
            "num_key_value_heads": num_heads // 2, "max_position_embeddings": 8192, "initializer_range": 0.05,
            "pad_token_id": 0, "bos_token_id": None, "eos_token_id": None,
        }  # fmt: skip
        torch.manual_seed(0)
        model = tf.AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**sizes | fields)).eval()
    model.generation_config.eos_token_id = None
    result: tf.PreTrainedModel = model.to(dtype)
    return result


def spent(call: Callable[[], object]) -> float:
    begin = time.process_time()
    call()
    return time.process_time() - begin


# --- engines ----------------------------------------------------------------------------------------------------------


def make_engine(model: tf.PreTrainedModel, same_bits: bool, num_blocks: int) -> Engine:
    cache = CacheConfig(BLOCK_SIZE, num_blocks)
    config = EngineConfig(
        cache, max_num_batched_tokens=4096, max_num_seqs=64, enable_prefix_caching=False, same_bits=same_bits
    )
    return Engine.from_model(model, config)


def params(num_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)


def prompt_seconds(engine: Engine, num_tokens: int) -> float:
    (prompt,) = random_prompts([num_tokens], VOCAB)
    return spent(lambda: engine.generate([prompt], params(1)))


def decode_seconds(engine: Engine, num_seqs: int, num_steps: int) -> float:
    """Return the seconds of a step, after that of the prompts and one more."""
    for prompt in random_prompts([SHORT] * num_seqs, VOCAB):
        engine.add_request(prompt, params(num_steps + 2))
    engine.step()
    engine.step()
    taken = spent(lambda: [engine.step() for _ in range(num_steps)])
    assert not engine.has_unfinished, "each step decodes all sequences"
    return taken / num_steps


# --- generate ---------------------------------------------------------------------------------------------------------

FRESH = itertools.count()


def generate(model: Any, ids: torch.Tensor, num_tokens: int, cache: object = None) -> torch.Tensor:
    rules = {"max_new_tokens": num_tokens, "do_sample": False, "pad_token_id": 0}
    tokens: torch.Tensor = model.generate(ids, attention_mask=torch.ones_like(ids), past_key_values=cache, **rules)
    return tokens


def over_blocks(pool: KVPageCachePool, ids: torch.Tensor, num_tokens: int) -> torch.Tensor:
    with KVPageCache(pool, ids, namespace=b"%d" % next(FRESH)) as cache:
        return generate(pool.model, ids, num_tokens, cache)


def check_rows(pool: KVPageCachePool, ids: torch.Tensor, num_tokens: int) -> None:
    alone = [over_blocks(pool, row[None], num_tokens) for row in ids[:2]]
    assert torch.equal(torch.cat(alone), over_blocks(pool, ids, num_tokens)[:2]), "a row's tokens are its own"


# --- rows of the table ------------------------------------------------------------------------------------------------

Calls = dict[str, Callable[[], float]]


def calls_of(task: str, model: tf.PreTrainedModel, options: Any) -> Calls:
    """Return what gives the seconds of a task, without the option, with it, and without kvpage."""
    num_seqs = options.seqs if task.endswith("many") else 1
    num_blocks = num_seqs * (SHORT + options.tokens) // BLOCK_SIZE + 2 * num_seqs + options.prompt_tokens // BLOCK_SIZE
    ways = {"without": False, "with": True}
    if not task.startswith("generate"):
        engines = {name: make_engine(model, same_bits, num_blocks + 8) for name, same_bits in ways.items()}
        if task == "prompt":
            return {
                n: functools.partial(prompt_seconds, engine, options.prompt_tokens) for n, engine in engines.items()
            }
        return {n: functools.partial(decode_seconds, engine, num_seqs, options.tokens) for n, engine in engines.items()}
    ids = torch.tensor(random_prompts([SHORT] * num_seqs, VOCAB))
    config = CacheConfig(BLOCK_SIZE, 2 * num_blocks + 8)
    pools = {n: KVPageCachePool.from_model(model, config, same_bits=same_bits) for n, same_bits in ways.items()}
    check_rows(pools["with"], ids, options.tokens)
    calls: Calls = {
        name: functools.partial(spent, functools.partial(over_blocks, pool, ids, options.tokens))
        for name, pool in pools.items()
    }
    return calls | {"plain": functools.partial(spent, functools.partial(generate, model, ids, options.tokens))}


def measure(kind: str, dtype: str, model: tf.PreTrainedModel, task: str, options: Any) -> Row:
    taken = in_turns(calls_of(task, model, options), options.rounds, measure=result, rotates=True)
    times = {
        f"{name} ms": Figure.of(taken[name], 1e3) if name in taken else None for name in ("without", "with", "plain")
    }
    return {"model": kind, "dtype": dtype, "task": task, **times, "cost": Figure.ratio(taken["with"], taken["without"])}


def rows(options: Any) -> Iterator[Row]:
    for kind, dtype in itertools.product(options.models, options.dtypes):
        model = make_model(kind, DTYPES[dtype])
        for task in options.tasks:
            yield measure(kind, dtype, model, task, options)


def main() -> None:
    options = parse(
        "same_bits",
        __doc__,
        rounds=9,
        threads=1,
        models=option(list(KINDS), "of random weights", choices=KINDS),
        dtypes=option(["fp32", "bf16"], choices=["fp32", "bf16"]),
        tasks=option(list(TASKS), choices=TASKS),
        prompt_tokens=1400,
        seqs=32,
        tokens=32,
    )
    results = shown(COLUMNS, rows(options))
    names = [f"{row['model']}, {row['dtype']}, {row['task']}" for row in results]
    costs = {"": [row["cost"] for row in results]}
    finish(options, lambda path: grouped(path, names, costs, "with same_bits, of without it", [1.0]), rows=results)


if __name__ == "__main__":
    main()
