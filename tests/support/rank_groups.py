"""Two ranks whose models have windows of their own blocks, or states: `python rank_groups.py FOLDER KIND...`.

It leaves in the folder what two ranks and one process have seen of each kind, and the tokens of model.generate.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from support.models import VOCAB, WINDOW
from support.rank_models import run_ranks, whole_model
from support.rank_work import Seat, raise_error, raise_for
from support.state_engines import greedy, own_tokens, random_prompt
from support.state_engines import poison as poison_states
from support.state_models import make_state_model
from support.window_engines import KINDS, B, make_window_model
from support.window_engines import poison as poison_windows

from kvpage import CacheConfig
from kvpage.serving import Engine, EngineConfig, StateConfig
from kvpage.serving.assembly import engine_parts, parts
from kvpage.serving.loop.ranks.rank_caches import RankCaches

NUM_TOKENS = 13
LENGTHS = 1, B - 1, B, B + 1, 9 * B, 5 * B + 3, 7 * B
CONFIG = EngineConfig(
    CacheConfig(B, 24, num_cpu_blocks=64),
    max_num_seqs=4,
    max_num_batched_tokens=13,
    rank_timeout=240.0,
    load_or_compute=False,
)
WINDOWS = replace(CONFIG, num_window_blocks=WINDOW // B + 4)
STATES = replace(CONFIG, cache_config=CacheConfig(B, 16, num_cpu_blocks=64), states=StateConfig(1 << 20, 1 << 20))


def prompts() -> list[list[int]]:
    """More than the blocks hold."""
    return [random_prompt(length, length) for length in LENGTHS]


def poison(engine: Engine) -> None:
    """Fill what belongs to nobody with NaN. Where copies are due, the step must make them first: others are told."""
    groups = [window.blocks.moves for window in engine.manager.windows]
    if engine.states is not None:
        groups.append(engine.manager.states.space.moves)
    if any(groups):
        return
    (poison_windows if engine.states is None else poison_states)(engine)


def fill(caches: RankCaches) -> None:
    """Fill all with NaN: nothing that is read was there before it was written."""
    for cache in (caches.full, *caches.windows):
        for layer in (*cache.gpu_cache, *cache.cpu_cache):
            layer.fill_(torch.nan)
    if caches.states is not None:
        caches.states.slots.fill_(0xFF)
        caches.states.host_slots.fill_(0xFF)


def tokens_of(engine: Engine, asked: list[list[int]], **arguments: Any) -> list[list[int]]:
    """Return the tokens of each prompt, all of which are computed together."""
    ids, outputs = [engine.add_request(prompt, greedy(NUM_TOKENS), **arguments) for prompt in asked], {}
    while engine.has_unfinished:
        poison(engine)
        ended = [one.output for one in engine.step() if one.output is not None]
        outputs.update((output.request_id, output.samples[0].token_ids) for output in ended)
        engine.manager.check()
    return [outputs[request_id] for request_id in ids]


def served(engine: Engine, bad_token: int) -> dict[str, Any]:
    """Return tokens of prompts together, of longer ones later, of samples; and beside an error, after an abort.

    bad_token: a token with which the model raises.
    """
    asked, long, parted = prompts(), [*prompts()[4], 5, 7], [*prompts()[4][:-3], 5, 7]
    engine.warmup()
    tokens = {"together": tokens_of(engine, asked)}
    engine.warmup()  # padding leaves all states
    tokens["longer"] = tokens_of(engine, [long], cache_at=[len(parted) - 2])
    tokens["parted"] = tokens_of(engine, [parted])
    samples = engine.generate([long], greedy(NUM_TOKENS, n=3))[0].samples
    tokens["samples"] = [sample.token_ids for sample in samples]
    aborted = engine.add_request(asked[6], greedy(NUM_TOKENS))
    engine.step()
    engine.abort(aborted)
    ended = engine.generate([asked[3], [*asked[2], bad_token], asked[5]], greedy(NUM_TOKENS))
    tokens["beside an error"] = [output.samples[0].token_ids for output in ended if output.finish_reason != "error"]
    engine.manager.check()
    stats = engine.stats()
    return {"tokens": tokens, "counts": [stats.num_preemptions, stats.num_swaps, stats.num_cached_tokens]}


def expected(model: PreTrainedModel) -> dict[str, list[list[int]]]:
    """Return the tokens of model.generate for the same prompts."""
    asked, long, parted = prompts(), [*prompts()[4], 5, 7], [*prompts()[4][:-3], 5, 7]
    each = [own_tokens(model, prompt, NUM_TOKENS) for prompt in asked]
    longer, of_parted = (own_tokens(model, prompt, NUM_TOKENS) for prompt in (long, parted))
    return {
        "together": each,
        "longer": [longer],
        "parted": [of_parted],
        "samples": [longer] * 3,
        "beside an error": [each[3], each[5]],
    }


def bad_token_of(model: PreTrainedModel, tokens: dict[str, list[list[int]]]) -> int:
    """Let the model raise for a token that is neither in the prompts nor in the answers; return the token."""
    rows = [*prompts(), [5, 7], *(row for rows in tokens.values() for row in rows)]
    bad_token = max(set(range(VOCAB)) - {token for row in rows for token in row})
    raise_for(model, bad_token, raise_error)
    return bad_token


def config_of(kind: str) -> EngineConfig:
    return WINDOWS if kind in KINDS else STATES


def serve_alone(seat: Seat, kind: str) -> None:
    """Note the tokens of model.generate, and what an engine of one process gives."""
    model = (make_window_model if kind in KINDS else make_state_model)(kind)
    model.resize_token_embeddings(VOCAB + 1, mean_resizing=False)  # some versions split only an even number
    model.save_pretrained(seat.folder / kind)
    model = whole_model(seat.folder / kind)
    seat.seen[f"{kind}: generate"] = tokens = expected(model)
    bad_token = bad_token_of(model, tokens)
    seat.note(kind, lambda: served(Engine.from_model(model, config_of(kind)), bad_token))


def serve_as_two(seat: Seat, kind: str, tokens: dict[str, list[list[int]]]) -> None:
    """Serve one kind with two ranks. tokens: of model.generate. A store is refused then, on both."""
    model, config = seat.model(kind), config_of(kind)
    bad_token = bad_token_of(model, tokens)
    seat.serve(kind, model, lambda engine: served(engine, bad_token), config)
    call, config = Engine.follow if seat.rank else Engine.from_model, replace(config, tensor_parallel_size=2)
    seat.note(f"{kind}: a store", lambda: call(model, config, store=object()))


def serve_all(seat: Seat, kinds: list[str], seen: dict[str, Any]) -> None:
    """Serve each kind with two ranks, over caches that are full of NaN. seen: by one process."""
    assembled = parts.assemble_rank

    def assemble(*arguments: Any) -> Any:
        rank_parts = assembled(*arguments)
        fill(rank_parts.caches)
        return rank_parts

    parts.assemble_rank = engine_parts.assemble_rank = assemble
    for kind in kinds:
        serve_as_two(seat, kind, seen[f"{kind}: generate"])


def main(folder: Path, kinds: list[str]) -> None:
    torch.set_num_threads(1)
    alone = Seat(0, 1, folder)
    for kind in kinds:
        serve_alone(alone, kind)
    statuses = run_ranks(2, lambda rank: serve_all(Seat(rank, 2, folder), kinds, alone.seen))
    (folder / "statuses.json").write_text(json.dumps(statuses))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
