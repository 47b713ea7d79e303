"""AsyncEngines over tiny models, and the tokens of an Engine for the same work."""

from collections.abc import Sequence

from support.insides import stepper_of
from support.models import make_model
from support.waiting import until

from kvpage import CacheConfig
from kvpage.serving import AsyncEngine, AsyncEngineConfig, Engine, EngineConfig, SamplingParams

B = 4
Work = tuple[list[int], SamplingParams]


def make_live(config: AsyncEngineConfig | None = None, num_blocks: int = 96, model=None, **fields) -> AsyncEngine:
    """So few blocks by default that requests are preempted."""
    engine = Engine.from_model(model or make_model("llama"), EngineConfig(CacheConfig(B, num_blocks), **fields))
    return AsyncEngine(engine, config or AsyncEngineConfig())


def expected(works: Sequence[Work]) -> list[list[list[int]]]:
    """Return the tokens of each sample of each request, computed by an Engine alone."""
    engine = Engine.from_model(make_model("llama"), EngineConfig(CacheConfig(B, 512)))
    outputs = engine.generate([tokens for tokens, _ in works], [params for _, params in works])
    return [[sample.token_ids for sample in output.samples] for output in outputs]


def check_nothing_left(live: AsyncEngine) -> None:
    """No request, and no block, is held, once what was aborted and what is being stored has ended."""
    until(lambda: _num_held(live) == (0, 0, 0, 0))
    live.call(lambda engine: engine.manager.check()).result()
    stepper = stepper_of(live)
    assert not stepper._mailboxes and not stepper.sink and not live.engine.has_unfinished


def _num_held(live: AsyncEngine) -> tuple[int, int, int, int]:
    stats = live.stats()
    return stats.num_unfinished, stats.num_waiting, stats.engine.num_running, stats.engine.num_used_blocks
