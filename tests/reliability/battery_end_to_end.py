"""Small fp32 models served under everything at once: blocks overcommitted three times, two tiers of them, windows,
n > 1, namespaces, aborts, over a store of memory, a disk that fails and a Redis in trouble. Every token is that of a
run alone without any cache, the budgets are kept, and resident memory stays flat.

    Model: prompts, their tokens alone ─► requests at random ─► Engine ─► KVStore ─► tiers ◄── Chaos, between two steps
"""

import gc
import logging
import random
import tempfile
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from battery import Advance, Battery, Figures
from chaos import Chaos
from resident import Resident
from support.models import generate_each, make_model, make_prompts

from kvpage import CacheConfig
from kvpage.serving import Engine, EngineConfig, RequestOutput, SamplingParams
from kvpage.store import KVStore, KVStoreConfig, metadata_of
from kvpage.store.stack.placed import Placed

B, CHUNK = 4, 8
KINDS = ("llama", "mistral", "gemma3")  # the second with windows, the third in every other layer
MAX_TOKENS, NUM_SAMPLES = 10, 3
GREEDY = SamplingParams(max_tokens=MAX_TOKENS)
DRAWN = SamplingParams(max_tokens=MAX_TOKENS, temperature=1.0, seed=11, n=NUM_SAMPLES)
NUM_AT_ONCE = 9  # requests; about 14 blocks each, those for several samples more
NUM_BLOCKS, NUM_HOST_BLOCKS = 40, 20
log = logging.getLogger("reliability.end_to_end")
TOLD_EACH = 100  # engines
REQUESTS_EACH = 75  # of one engine; the next one finds what the disk and Redis hold


@dataclass(frozen=True, slots=True)
class Ask:
    """A prompt, how it is to be sampled, and the tokens of each sample."""

    tokens: list[int]
    params: SamplingParams
    expected: list[list[int]]


class Model:
    """A model, and what it says to prompts that share beginnings, without a cache."""

    def __init__(self, kind: str, seed: int) -> None:
        self.kind, self.model = kind, make_model(kind)
        stems = make_prompts([9 * B + 2, 6 * B, 3 * B + 1], seed)
        tails = make_prompts([1, 3, B + 1, 2 * B, 7, 2, 5 * B, 13], seed + 1)
        prompts = [stem + tail for stem in stems for tail in tails] + make_prompts([1, B - 1, B, 11 * B], seed + 2)
        begins, rest = make_prompts([CHUNK] * 3, seed + 3), make_prompts([3 * CHUNK + 1], seed + 4)[0]
        prompts += [begin + rest for begin in begins]  # chunks of the same tokens behind others
        shaken = shake(make_model(kind))
        self.asks = []
        for params in (GREEDY, DRAWN):
            found, again = alone(self.model, prompts, params), together(shaken, prompts, params)
            both = zip(prompts, found, again, strict=True)
            self.asks += [Ask(tokens, params, wanted) for tokens, wanted, other in both if wanted == other]
        assert len(self.asks) > len(prompts), "hardly any prompt is beyond doubt"
        greedy = [ask for ask in self.asks if ask.params is GREEDY]
        by_itself = generate_each(self.model, [ask.tokens for ask in greedy], MAX_TOKENS)
        assert [ask.expected[0] for ask in greedy] == by_itself, "alone, it is not what model.generate says"


def shake(model: torch.nn.Module) -> torch.nn.Module:
    """Weights moved by more than rounding moves the sums: prompts to which it says something else are too close to a
    tie, where the order of a sum, which batches change, decides.
    """
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + 3e-5 * torch.randn(parameter.shape, generator=generator))
    return model


def alone(model: torch.nn.Module, prompts: list[list[int]], params: SamplingParams) -> list[list[list[int]]]:
    """The tokens of each sample of each prompt, one request after the other, without a cache."""
    engine = Engine.from_model(
        model, EngineConfig(CacheConfig(block_size=B, num_gpu_blocks=128), enable_prefix_caching=False)
    )
    outputs = []
    for prompt in prompts:
        samples: list[list[int]] = []
        for index in range(params.n):
            one = replace(params, n=1, seed=None if params.seed is None else params.seed + index)
            samples.append(engine.generate([prompt], one)[0].token_ids)
        outputs.append(samples)
    return outputs


def together(model: torch.nn.Module, prompts: list[list[int]], params: SamplingParams) -> list[list[list[int]]]:
    """As `alone`, but for the order of sums."""
    engine = Engine.from_model(
        model, EngineConfig(CacheConfig(block_size=B, num_gpu_blocks=2048), enable_prefix_caching=False)
    )
    return [[sample.token_ids for sample in output.samples] for output in engine.generate(prompts, params)]


class Server:
    """An engine and its store; serves requests and compares what comes of them."""

    def __init__(self, model: Model, chaos: Chaos, placed: list[Placed], rng: random.Random, figures: Figures) -> None:
        self.model, self.chaos, self.placed, self.rng, self.figures = model, chaos, placed, rng, figures
        cache = CacheConfig(block_size=B, num_gpu_blocks=NUM_BLOCKS, num_cpu_blocks=NUM_HOST_BLOCKS)
        is_loading = rng.random() < 0.7  # whatever it costs; otherwise as the rule says
        config = EngineConfig(
            cache, max_num_seqs=24, max_num_batched_tokens=60, load_or_compute=not is_loading, store_deadline=0.2
        )
        self.engine = Engine.from_model(model.model, config)
        for layer in (*self.engine.cache.gpu_cache, *self.engine.cache.cpu_cache):
            layer.fill_(float("nan"))
        metadata = metadata_of(self.engine.cache, model.kind)
        self.store = KVStore(KVStoreConfig(CHUNK, save_decode_cache=True, num_threads=2), metadata, placed)
        self.engine.use_store(self.store)
        self.asked: dict[str, Ask] = {}

    def serve(self, count: int, advance: Advance) -> None:
        num_added = num_steps = 0
        while num_added < count or self.engine.has_unfinished:
            while num_added < count and len(self.asked) < NUM_AT_ONCE:
                self._add()
                num_added += 1
            for one in self.engine.step():
                if one.output:
                    self._check(one.output, advance)
            num_steps += 1
            self._disturb(num_steps)

    def close(self) -> None:
        self.chaos.check_budgets(self.placed)
        self.engine.close()
        self.engine.manager.check()
        stats, store = self.engine.stats(), self.store.stats()
        assert stats.num_used_blocks == 0, f"{stats.num_used_blocks} blocks are in use, and nobody is left"
        for name, value in (
            ("preemptions", stats.num_preemptions),
            ("swaps", stats.num_swaps),
            ("store_hit_tokens", store.hit_tokens),
            ("corrupt_records", store.corrupt_records),
            ("tier_errors", store.tier_errors),
        ):
            self.figures[name] += value
        self.store.close()

    def _add(self) -> None:
        ask = self.rng.choice(self.model.asks)
        namespace = self.rng.choice([b"", b"", b"a tenant"])
        self.asked[self.engine.add_request(ask.tokens, ask.params, namespace=namespace)] = ask

    def _check(self, output: RequestOutput, advance: Advance) -> None:
        ask = self.asked.pop(output.request_id)
        found = [sample.token_ids for sample in output.samples]
        assert found == ask.expected, f"{self.model.kind}, prompt {ask.tokens}: {found} instead of {ask.expected}"
        self.figures["requests"] += 1
        self.figures["tokens"] += sum(map(len, found))
        advance(1)

    def _disturb(self, num_steps: int) -> None:
        if self.asked and self.rng.random() < 0.02:
            self._abort(self.rng.choice(list(self.asked)), self.figures)
        if self.rng.random() < 0.05:
            self.chaos.happen()
        if num_steps % 50 == 0:
            self.engine.manager.check()
            self.chaos.check_budgets(self.placed)
            stats = self.engine.stats()
            assert stats.store is not None and stats.store.num_errors == 0, "the store raised"

    def _abort(self, request_id: str, figures: Figures) -> None:
        ask, output = self.asked.pop(request_id), self.engine.abort(request_id)
        found = [sample.token_ids for sample in output.samples]
        for tokens, wanted in zip(found, ask.expected, strict=False):
            assert tokens == wanted[: len(tokens)], f"{self.model.kind}, aborted {ask.tokens}: {tokens}, not {wanted}"
        figures["aborted"] += 1


COUNTS = (
    "requests", "tokens", "aborted", "engines", "events", "preemptions", "swaps", "store_hit_tokens",
    "corrupt_records", "tier_errors",
)  # fmt: skip


def run(seed: int, count: int, advance: Advance) -> Figures:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # faster for models this small
    try:
        return _run(seed, count, advance)
    finally:
        torch.set_num_threads(num_threads)


def _run(seed: int, count: int, advance: Advance) -> Figures:
    rng, figures, resident = random.Random(seed), dict.fromkeys(COUNTS, 0), Resident()
    models = [Model(kind, 3 * seed) for kind in KINDS]
    with tempfile.TemporaryDirectory() as place, closing(Chaos(Path(place), rng)) as chaos:
        while figures["requests"] < count and (not resident.samples or advance(0) is not False):
            model = models[figures["engines"] % len(KINDS)]
            with chaos.tiers() as placed:
                try:
                    server = Server(model, chaos, placed, rng, figures)
                    server.serve(min(REQUESTS_EACH, count - figures["requests"]), advance)
                    server.close()
                except Exception as error:
                    raise AssertionError(f"seed {seed}, engine {figures['engines']}: {error}") from error
            figures["engines"] += 1
            gc.collect()
            resident.sample()
            if figures["engines"] % TOLD_EACH == 0:
                log.info("%s", figures | resident.figures())
        figures["events"] = chaos.num_events
    idle = [name for name in ("aborted", "events", "preemptions", "swaps", "store_hit_tokens") if not figures[name]]
    assert figures["requests"] < SHORT or not idle, f"seed {seed}: no {', '.join(idle)}, which says nothing"
    return figures | resident.figures()


SHORT, LONG = 800, 60_000
LIMITS = {"max_resident_grown_kib": 2048, "max_resident_kib_an_hour": 1024}
BATTERIES = [
    Battery("end to end", "requests", SHORT, LONG, run, limits=LIMITS, longest=100 * LONG),
]
