"""Engine: prompts, parameters and ids of every kind, with steps between them."""

import functools
import random
from typing import Any

import torch
import transformers
from fuzz_case import Case, World
from fuzz_values import as_integers
from support.models import CONFIGS

from kvpage import CacheConfig, OutOfBlocks
from kvpage.blend import BlendConfig
from kvpage.serving import BeamSearchParams, Engine, EngineConfig, SamplingParams


@functools.cache
def model() -> Any:
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(CONFIGS["llama"]()).eval()


class ServingWorld(World):
    covers = ("kvpage.serving.Engine",)

    def __init__(self, rng: random.Random) -> None:
        self.rng, self.num_made, self.ids = rng, 0, []
        blend = BlendConfig(0.5, 1, separator=(3,), max_bytes=1 << 14)
        self.engine = Engine.from_model(
            model(), EngineConfig(CacheConfig(4, 24, 6), max_num_seqs=4, max_model_len=64, blend=blend)
        )

    def __exit__(self, kind: object, *error: object) -> None:
        if kind is None:
            for request_id in list(self.engine.loop.requests):
                self.engine.abort(request_id)
            self.check()
            assert self.engine.manager.num_free_blocks == 24
        self.engine.close()

    def snapshot(self) -> object:
        manager, stats = self.engine.manager, self.engine.stats()
        return (
            list(self.engine.loop.requests),
            stats.num_running,
            stats.num_waiting,
            manager.pool.num_free,
            manager.tree.num_matches,
        )

    def check(self) -> None:
        self.engine.manager.check()

    def case(self, rng: random.Random) -> Case:
        names = "add add add add blend blend abort abort step check_tokens length explain generate stream beams warm"
        return getattr(self, f"_{rng.choice(names.split())}")()

    def _prompt(self) -> list[int]:
        return [self.rng.randrange(1, 4) for _ in range(self.rng.randint(1, 12))]

    def _params(self) -> SamplingParams:
        return SamplingParams(max_tokens=self.rng.randint(1, 3), temperature=self.rng.choice((0.0, 1.0)), seed=1)

    def _add(self) -> Case:
        self.num_made += 1
        args = {
            "tokens": as_integers(self._prompt(), self.rng),
            "params": self._params(),
            "request_id": f"{self.num_made}th",  # "1" made wrong may be "11"
            "namespace": b"",
            "cache_at": self.rng.choice(((), [1])),
        }
        if len(self.engine.loop.requests) > 6:
            return self._step()
        return Case("engine.add_request", self.engine.add_request, args)

    def _blend(self) -> Case:
        """With segments by separator, by length, and none."""
        case = self._add()
        if case.name != "engine.add_request":
            return case
        prompt = self._prompt()
        segments = self.rng.choice((None, [], [len(prompt)], [1] * (len(prompt) // 2)))
        case.args |= {"tokens": prompt, "blend": self.rng.random() < 0.7, "segments": segments}
        return case

    def _warm(self) -> Case:
        args = {"segments": [self._prompt() for _ in range(self.rng.randrange(3))], "namespace": b""}
        return Case("engine.warm_segments", self.engine.warm_segments, args)

    def _abort(self) -> Case:
        request_id = self.rng.choice([*self.engine.loop.requests, "nobody"])
        return Case(
            "engine.abort", self.engine.abort, {"request_id": request_id}, errors=(KeyError,), may_raise=(KeyError,)
        )

    def _step(self) -> Case:
        return Case("engine.step", self.engine.step)

    def _check_tokens(self) -> Case:
        return Case("engine.check_tokens", self.engine.check_tokens, {"tokens": self._prompt()})

    def _explain(self) -> Case:
        return Case("engine.explain", self.engine.explain, {"tokens": self._prompt(), "namespace": b""})

    def _length(self) -> Case:
        return Case("engine.check_length", self.engine.check_length, {"num_prompt_tokens": 3, "max_tokens": 4})

    def _generate(self) -> Case:
        marks = self.rng.choice(((), [1]))
        args = {"prompts": [self._prompt()], "params": self._params(), "progress": None, "cache_at": marks}

        def generate(**given: Any) -> Any:
            if callable(given.get("progress")):
                given["progress"] = None  # one that raises ends a call that is under way
            return self.engine.generate(**given)

        return Case("engine.generate", generate, args)

    def _stream(self) -> Case:
        marks = self.rng.choice(((), [1]))
        args = {"tokens": self._prompt(), "params": self._params(), "blend": False, "segments": None, "cache_at": marks}
        return Case("engine.stream", self.engine.stream, args, done=lambda stream: stream.close())

    def _beams(self) -> Case:
        args = {"prompts": [self._prompt()], "params": BeamSearchParams(2, 2), "namespace": b""}
        return Case("engine.beam_search", self.engine.beam_search, args, may_raise=(OutOfBlocks,))
