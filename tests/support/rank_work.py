"""The work of several ranks: `python rank_work.py FOLDER` leaves there what each rank of 2 and of 4 has seen.

It is a program of its own: ranks are forks of it, and it has used no threads.
"""

import importlib.util
import json
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers import PreTrainedModel

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from support.rank_models import VOCAB, run_ranks, save_model, sharded_model, whole_model

from kvpage import CacheConfig
from kvpage.serving import BeamSearchParams, Branches, Engine, EngineConfig, RankLost, SamplingParams
from kvpage.store import KVStore, KVStoreConfig, KVStoreMetadata

KINDS = {2: ("llama", "qwen3", "mixtral", "deepseek_v3"), 4: ("llama", "mixtral")}
# transformers 4 shards the second version in a way in which its own forward fails.
LATENT_KIND = "deepseek_v2" if int(transformers.__version__.split(".")[0]) >= 5 else "deepseek_v3"
POISON, ALONE, DEADLY = VOCAB - 1, VOCAB - 2, VOCAB - 3  # tokens with which the model raises, or a rank dies
CONFIG = EngineConfig(
    CacheConfig(block_size=8, num_gpu_blocks=24, num_cpu_blocks=16),
    max_num_seqs=4,
    max_num_batched_tokens=64,
    rank_timeout=240.0,
    load_or_compute=False,
    store_deadline=60.0,
)
LATENTS = replace(CONFIG, cache_config=replace(CONFIG.cache_config, backend="mla"))


def prompts() -> list[list[int]]:
    """More than the blocks hold, two of them with a common prefix."""
    random = np.random.default_rng(0)
    found = [random.integers(1, VOCAB - 3, length).tolist() for length in (5, 33, 16, 17, 40, 12)]
    return [*found, [*found[1], 3, 4, 5]]


def served(engine: Engine) -> dict[str, Any]:
    """Return greedy tokens and drawn ones, and how they came about."""
    greedy = engine.generate(prompts(), SamplingParams(max_tokens=12))
    drawn = engine.generate(prompts(), SamplingParams(max_tokens=12, temperature=1.0, top_p=0.9, seed=7))
    stats = engine.stats()
    return {
        "greedy": [output.token_ids for output in greedy],
        "drawn": [output.token_ids for output in drawn],
        "num_cached": stats.num_cached_tokens,
        "num_swapped": stats.transfers["swap_in"].num_blocks + stats.transfers["swap_out"].num_blocks,
    }


class Seat:
    """One rank's place: the model's shard, and what it has seen."""

    def __init__(self, rank: int, size: int, folder: Path) -> None:
        self.rank, self.size, self.folder = rank, size, folder
        self.seen: dict[str, Any] = {}

    def model(self, kind: str) -> PreTrainedModel:
        return sharded_model(self.folder / kind)

    def serve(
        self, name: str, model: PreTrainedModel, work: Callable[[Engine], Any] = served, config: EngineConfig = CONFIG,
        store: KVStore | None = None,
    ) -> None:  # fmt: skip
        """Do the work on rank 0, while the others follow; note its result or its error."""
        config = replace(config, tensor_parallel_size=self.size)
        if self.rank:
            self.note(name, lambda: Engine.follow(model, config, store=store))
            return
        engine = Engine.from_model(model, config, store=store)
        self.note(name, lambda: work(engine))
        engine.close()
        engine.close()

    def note(self, name: str, work: Callable[[], Any]) -> None:
        """Keep what `work` returns, or the error that it raises, also if this process dies later."""
        try:
            self.seen[name] = work()
        except Exception as error:
            self.seen[name] = f"{type(error).__name__}: {error}"
        path = self.folder / f"seen-{self.size}-{self.rank}.json"
        path.write_text(json.dumps(self.seen))


def raise_for(model: PreTrainedModel, token: int, act: Callable[[], None]) -> None:
    """Let the model act when it is given this token."""

    def look(module: torch.nn.Module, arguments: tuple[torch.Tensor, ...]) -> None:
        if bool((arguments[0] == token).any()):
            act()

    model.get_input_embeddings().register_forward_pre_hook(look)


def raise_error() -> None:
    raise ArithmeticError("the model does not like this token")


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


# --- what is done ----------------------------------------------------------------------------------------------------


def steered(engine: Engine) -> Any:
    """Return the likeliest tokens of two branches that part, beams, and tokens after a reset of the cache."""
    with Branches(engine) as branches:
        branch = branches.start(prompts()[1])
        branches.compute([branch])
        fork = branches.fork(branch)
        branch.append([5])
        fork.append([6, 7])
        likeliest = branches.compute([branch, fork]).argmax(dim=-1).tolist()
    beams = engine.beam_search(prompts()[:1], BeamSearchParams(num_beams=2, max_tokens=6))[0].token_ids
    engine.reset_prefix_cache()
    return likeliest, beams, engine.generate(prompts()[:2], SamplingParams(max_tokens=4))[1].token_ids


def stored(engine: Engine) -> Any:
    """Return the tokens, and how many of the prompts' came out of the store."""
    tokens = [output.token_ids for output in engine.generate(prompts(), SamplingParams(max_tokens=4))]
    engine.debug.connectors.drain()  # while there are counters
    return tokens, engine.stats().store.num_loaded_tokens


def generated(engine: Engine) -> Any:
    """Return the tokens of two prompts."""
    return [output.token_ids for output in engine.generate(prompts()[:2], SamplingParams(max_tokens=4))]


def example() -> Any:
    """Return the module of the example."""
    spec = importlib.util.spec_from_file_location("ranks", Path(__file__).parents[2] / "examples" / "ranks.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def poisoned(engine: Engine) -> Any:
    """Return the ends of requests of which one makes the model raise on all ranks."""
    bad = [*prompts()[2], POISON]
    outputs = engine.generate([prompts()[0], bad, prompts()[3]], SamplingParams(max_tokens=4))
    return [(output.finish_reason, output.token_ids) for output in outputs]


def lost(engine: Engine, token: int) -> Any:
    """Return the errors of the step that one rank has left, and of the next call."""
    errors = []
    for prompt in ([*prompts()[2], token], prompts()[0]):
        try:
            engine.generate([prompt], SamplingParams(max_tokens=4))
        except RankLost as error:
            errors.append(str(error))
    return errors


def refused(seat: Seat) -> None:
    """Note what is refused, on every rank: after it the ranks can still make an engine."""
    model, size = seat.model("llama"), seat.size
    for name, config in {
        "size 1": CONFIG,
        "size 3": replace(CONFIG, tensor_parallel_size=3),
        "other configs": replace(CONFIG, tensor_parallel_size=size, native_layers=bool(seat.rank)),
    }.items():
        seat.note(name, lambda config=config: seat_call(seat)(model, config))
    config = replace(CONFIG, tensor_parallel_size=size)
    seat.note("two leads", lambda: Engine.from_model(model, config) and None)
    seat.note("whole model", lambda: seat_call(seat)(whole_model(seat.folder / "llama"), config))
    with make_store(0 if seat.rank else 1, size) as store:
        seat.note("a store of another rank", lambda: seat_call(seat)(model, config, store=store))


def seat_call(seat: Seat) -> Callable[..., Any]:
    return Engine.follow if seat.rank else Engine.from_model


def make_store(rank: int, size: int) -> KVStore:
    metadata = KVStoreMetadata("m", size, rank, kv_dtype=torch.float32)
    return KVStore(KVStoreConfig(16, ("memory://?size=4MiB",)), metadata)


def two(seat: Seat) -> None:
    """The work of two ranks. The last engine ends them."""
    refused(seat)
    for kind in KINDS[2]:
        seat.serve(kind, seat.model(kind))
    seat.serve("latents", seat.model(LATENT_KIND), config=LATENTS)
    llama = seat.model("llama")
    seat.serve("steered", llama, steered)
    seat.note("example", lambda: example().serve(llama, prompts()[:2], max_tokens=4) or None)
    with make_store(seat.rank, seat.size) as store:
        for name in ("to the store", "out of the store", "out of one rank's"):
            seat.serve(name, llama, stored, store=store)
            if name == "out of the store" and seat.rank:
                store.clear()
    raise_for(llama, POISON, raise_error)
    seat.serve("poisoned", llama, poisoned)
    if seat.rank:
        raise_for(llama, ALONE, raise_error)
    seat.serve("alone", llama, lambda engine: lost(engine, ALONE))


def four(seat: Seat) -> None:
    """The work of four ranks. Rank 2 dies in the end."""
    for kind in KINDS[4]:
        seat.serve(kind, seat.model(kind))
    llama = seat.model("llama")
    if seat.rank == 2:
        raise_for(llama, DEADLY, die)
    seat.serve("dead", llama, lambda engine: lost(engine, DEADLY))


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    for kind in {*KINDS[2], LATENT_KIND}:
        save_model(kind, folder)
    alone = Seat(0, 1, folder)
    for kind in KINDS[2]:
        alone.note(kind, lambda kind=kind: served(Engine.from_model(whole_model(folder / kind), CONFIG)))
    alone.note("latents", lambda: served(Engine.from_model(whole_model(folder / LATENT_KIND), LATENTS)))
    llama = whole_model(folder / "llama")
    alone.note("example", lambda: generated(Engine.from_model(llama, CONFIG)))
    alone.note("steered", lambda: steered(Engine.from_model(llama, CONFIG)))
    with make_store(0, 1) as store:
        alone.note("to the store", lambda: stored(Engine.from_model(llama, CONFIG, store=store)))
        alone.note("out of the store", lambda: stored(Engine.from_model(llama, CONFIG, store=store)))
    raise_for(llama, POISON, raise_error)
    alone.note("poisoned", lambda: poisoned(Engine.from_model(llama, CONFIG)))
    statuses = {
        2: run_ranks(2, lambda rank: two(Seat(rank, 2, folder))),
        4: run_ranks(4, lambda rank: four(Seat(rank, 4, folder))),
    }
    (folder / "statuses.json").write_text(json.dumps(statuses))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
