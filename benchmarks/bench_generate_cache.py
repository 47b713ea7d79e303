"""Measure the time that KVPageCache saves `model.generate` where a prefix is found, and its cost where none is.

The bound for a prefix that is found is a DynamicCache that holds it already, contiguous and for nothing: a copy of it
is made before the clock starts. Beside it `generate` as it is, which computes the prefix. Where nothing is found, that
is the bound: the forward is the same, and blocks are written besides. All answers are compared; the calls take turns,
and medians with their quartiles count, of the CPU time of one thread.

--working-bytes 0 gathers K and V out of the blocks at each step: see KVPageCachePool.
"""

import copy
import functools
import itertools
import time
from typing import Any

import torch
import transformers
from transformers import DynamicCache

from kvpage import CacheConfig
from kvpage.benchmarks.cells import Row, shown
from kvpage.benchmarks.figure import Figure
from kvpage.benchmarks.pictures import panels
from kvpage.benchmarks.script import finish, option, parse
from kvpage.benchmarks.serving_workloads import Shape, make_model
from kvpage.serving import KVPageCache, KVPageCachePool

BLOCK_SIZE, TAIL, NEW, VOCAB = 16, 32, 32, 2048
SHAPE = Shape(layers=6, hidden=384, intermediate=1152, heads=6, kv_heads=3)
NAMES = ("generate", "nothing found", "prefix found", "prefix for nothing")
COLUMNS = "{batch:>5} {prefix:>6}" + "".join(f" {{{name} ms:>21.0f}}" for name in NAMES)
COLUMNS += " {saved:>19.2f} {of bound:>19.2f} {miss:>19.2f}"


def generate(model: Any, ids: torch.Tensor, cache: transformers.Cache | None) -> torch.Tensor:
    rules = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
    return model.generate(ids, attention_mask=torch.ones_like(ids), past_key_values=cache, **rules)


def over_blocks(pool: KVPageCachePool, ids: torch.Tensor, namespace: bytes) -> torch.Tensor:
    with KVPageCache(pool, ids, namespace=namespace) as cache:
        return generate(pool.model, ids, cache)


def measure(model: Any, batch: int, num_prefix: int, rounds: int, working_bytes: int | None = None) -> Row:
    """Rows that share a prefix, and differ after it."""
    prefix = torch.randint(1, VOCAB, (1, num_prefix)).repeat(batch, 1)
    ids = torch.cat([prefix, torch.randint(1, VOCAB, (batch, TAIL))], dim=1)
    held = DynamicCache()
    with torch.no_grad():
        model(prefix, past_key_values=held)
    num_blocks = -(-(num_prefix + TAIL + NEW) // BLOCK_SIZE) * (batch + 1) + 8
    config = CacheConfig(block_size=BLOCK_SIZE, num_gpu_blocks=num_blocks)
    pool = KVPageCachePool.from_model(model, config, max_working_bytes=working_bytes)
    fresh = itertools.count()
    times: dict[str, list[float]] = {name: [] for name in NAMES}
    expected = generate(model, ids, None)
    for _ in range(rounds):
        with KVPageCache(pool, prefix[:1], namespace=b"found") as cache, torch.no_grad():
            model(prefix[:1, cache.get_seq_length() :], past_key_values=cache)
        calls = (
            functools.partial(generate, model, ids, None),
            functools.partial(over_blocks, pool, ids, b"%d" % next(fresh)),
            functools.partial(over_blocks, pool, ids, b"found"),
            functools.partial(generate, model, ids, copy.deepcopy(held)),
        )
        for name, call in zip(NAMES, calls, strict=True):
            begin = time.process_time()
            tokens = call()
            times[name].append(time.process_time() - begin)
            assert torch.equal(tokens, expected), f"{name}: the tokens are not those of generate"
    return {
        "prefix": num_prefix,
        "batch": batch,
        "rounds": rounds,
        **{f"{name} ms": Figure.of(spent, 1e3) for name, spent in times.items()},
        "saved": Figure.ratio(times["generate"], times["prefix found"]),
        "of bound": Figure.ratio(times["prefix for nothing"], times["prefix found"]),
        "miss": Figure.ratio(times["nothing found"], times["generate"]),
    }


def main() -> None:
    options = parse(
        "generate_cache",
        __doc__,
        rounds=7,
        threads=1,
        prefix=[128, 1024],
        batch=[1, 2],
        working_bytes=option(None, "of the pool; None: no limit", type=int),
    )
    torch.manual_seed(0)
    model = make_model(SHAPE, torch.float32, VOCAB, max_position_embeddings=16384, initializer_range=0.1)
    print(f"Llama of 6 layers, fp32; {TAIL} tokens behind the prefix, {NEW} generated; ms (quartiles)")
    cases = itertools.product(options.batch, options.prefix)
    results = shown(COLUMNS, (measure(model, *case, options.rounds, options.working_bytes) for case in cases))
    values, labels = [f"{name} ms" for name in NAMES], {"xlabel": "tokens of the shared prefix", "ylabel": "ms"}
    finish(options, lambda path: panels(path, results, "batch", x="prefix", values=values, **labels), results=results)


if __name__ == "__main__":
    main()
