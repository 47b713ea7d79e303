"""When does a prompt's first token come where prefill and decode are apart, and what do other requests notice of it?

Each contender is behind the same client, and has its own processes:

    one worker              1 thread: half of the cores of the other two
    one worker, 2 threads   the same cores as "apart"
    apart                   a prefill worker and a decode worker of 1 thread each, and a store in Redis between them
    apart, by layers        the same, where two layers at a time are stored while the next ones are computed

The prompt comes to idle workers, and while others decode. Its first token is bound by its computation: the first token
of one idle worker of 1 thread, which is measured in turns with the rest. The second token is bound by the first one and
a decode step. The requests under way are bound by their own pace, before the prompt comes. All tokens are compared
between the contenders.

It needs redis-server.
"""

import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from kvpage import CacheConfig
from kvpage.benchmarks.cells import Row, shown
from kvpage.benchmarks.figure import Figure
from kvpage.benchmarks.pictures import grouped
from kvpage.benchmarks.script import finish, option, parse, skip
from kvpage.benchmarks.serving_workloads import BLOCK_SIZE, MODELS, VOCAB, make_model
from kvpage.benchmarks.worker_process import WorkerPlan, WorkerProcess
from kvpage.integrations.remote import RemoteEngine, RemoteLoop, RemoteSettings, Workers
from kvpage.serving import AsyncEngine, EngineConfig, LiveRequest, SamplingParams

NUM_BUSY, BUSY_TOKENS, BEFORE = 4, 400, 12  # requests under way; their tokens; tokens before the prompt comes
MIN_PREFILL_TOKENS = 128
NUM_TOKENS = 4  # of the prompt's answer
LAYERS_PER_RECORD = 2  # of 8
COLUMNS = "{contender:<24} {workers:<8}{first ms:>18.0f}{second ms:>18.0f}{pace ms:>18.0f}{gap ms:>18.0f}"
SHAPE, START = MODELS["small"], WorkerProcess
Turn = dict[str, float]


def client(decode: Workers, prefill: Workers | None) -> AsyncEngine:
    """Return an engine over these workers."""
    with torch.device("meta"):
        skeleton = make_model(SHAPE, torch.float32, VOCAB)
    loop = RemoteLoop(decode, prefill, RemoteSettings(min_prefill_tokens=MIN_PREFILL_TOKENS))
    return AsyncEngine(RemoteEngine(skeleton, EngineConfig(CacheConfig(BLOCK_SIZE, 2048)), loop))


class Reader:
    """Reads a request in a thread, and notes when each token came. moments: seconds, one a token."""

    def __init__(self, request: LiveRequest) -> None:
        self.request, self.tokens, self.moments = request, list[int](), list[float]()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def await_tokens(self, num: int) -> None:
        while len(self.moments) < num and self._thread.is_alive():
            time.sleep(0.001)

    def join(self) -> None:
        self._thread.join()
        output = self.request.output
        assert output is not None and output.error is None, output

    def _read(self) -> None:
        for items in self.request:
            now = time.perf_counter()
            tokens = [item.token_id for item in items if item.token_id is not None]
            self.tokens += tokens
            self.moments += [now] * len(tokens)


def run_turn(engine: AsyncEngine, prompt: list[int], num_busy: int) -> tuple[list[int], Turn]:
    """Return the answer to a prompt, and the milliseconds of its first tokens.

    num_busy: requests that decode meanwhile; then also with their pace before, and their longest gap.
    """
    params = SamplingParams(max_tokens=BUSY_TOKENS)
    busy = [Reader(engine.submit([prompt[0], i + 1, *range(2, 16)], params)) for i in range(num_busy)]
    for reader in busy:
        reader.await_tokens(BEFORE)
    sent = time.perf_counter()
    reader = Reader(engine.submit(prompt, SamplingParams(max_tokens=NUM_TOKENS)))
    reader.join()
    for other in busy:
        other.request.abort()
    first, second = reader.moments[:2]
    turn = {"first": first - sent, "second": second - sent}
    if busy:
        turn["pace"] = float(np.median([gap for other in busy for gap in gaps(other.moments[2:], 0.0, sent)]))
        turn["gap"] = max(gap for other in busy for gap in gaps(other.moments, sent, second))
    return reader.tokens, {name: seconds * 1e3 for name, seconds in turn.items()}


def gaps(moments: list[float], begin: float, end: float) -> list[float]:
    """Return the seconds between tokens of which the later one came from `begin` to `end`; at least one."""
    found = [b - a for a, b in zip(moments, moments[1:], strict=False) if begin <= b <= end]
    return found or [end - max((moment for moment in moments if moment < end), default=begin)]


def measure(clients: dict[str, AsyncEngine], num_tokens: int, rounds: int) -> list[Row]:
    """Return a row for each contender and each of "idle" and "busy"; all take turns, with the same prompts."""
    draw, taken = np.random.default_rng(0), dict[tuple[str, str], list[Turn]]()
    for turn in range(rounds + 1):
        for kind, num_busy in (("idle", 0), ("busy", NUM_BUSY)):
            prompt = draw.integers(1, VOCAB, num_tokens).tolist()
            answers = []
            for name, engine in clients.items():
                tokens, spent = run_turn(engine, prompt, num_busy)
                answers.append(tokens)
                if turn:  # the first round warms up
                    taken.setdefault((name, kind), []).append(spent)
            assert all(answer == answers[0] for answer in answers), "the contenders' tokens differ"
    return [
        {"contender": name, "workers": kind} | {f"{key} ms": Figure.of(turn[key] for turn in turns) for key in turns[0]}
        for (name, kind), turns in taken.items()
    ]


@contextmanager
def contenders(url: str, portion: int) -> Iterator[dict[str, AsyncEngine]]:
    """Start the processes, and yield the clients by name. portion: tokens of a step."""
    apart = [("decode", 1), ("prefill", 1)]
    with ExitStack() as stack:
        plans = [WorkerPlan(*each, url, SHAPE, batched_tokens=portion) for each in [("both", 1), ("both", 2), *apart]]
        plans += [replace(plan, layers_per_record=LAYERS_PER_RECORD) for plan in plans[2:]]
        workers = [START(plan) for plan in plans]
        for worker in workers:
            stack.callback(worker.close)
        for worker in workers:
            worker.wait()
        pairs: dict[str, tuple[Any, Any]] = {"one worker": (workers[0], None)}
        pairs["one worker, 2 threads"] = workers[1], None
        pairs |= {"apart": (workers[2], workers[3]), "apart, by layers": (workers[4], workers[5])}
        made = {name: client(*pair) for name, pair in pairs.items()}
        for engine in made.values():
            stack.callback(engine.close)
        yield made


def main() -> None:
    options = parse(
        "prefill_decode",
        __doc__,
        rounds=5,
        tokens=option(1024, "of the prompt"),
        portion=option(256, "of it that a step computes"),
    )
    if shutil.which("redis-server") is None:
        skip("needs redis-server")
    from kvpage.benchmarks.bench_store_redis import redis_server

    with redis_server() as (_, port), contenders(f"redis://127.0.0.1:{port}/0", options.portion) as clients:
        rows = shown(COLUMNS, measure(clients, options.tokens, options.rounds))
    wanted = {"first token, idle": ("idle", "first ms"), "first token, others decode": ("busy", "first ms")}
    wanted["longest gap of the others"] = ("busy", "gap ms")
    series = {
        words: [row[column] for row in rows if row["workers"] == kind] for words, (kind, column) in wanted.items()
    }
    names = list(dict.fromkeys(row["contender"] for row in rows))
    finish(options, lambda path: grouped(path, names, series, "ms"), results=rows)


if __name__ == "__main__":
    main()
