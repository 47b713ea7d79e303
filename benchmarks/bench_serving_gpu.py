"""How near does serving on a GPU come to the bytes that it must read, and to its model captured in a CUDA graph?

A decode step has two bounds, both measured in the same run: serving_step_bound.py. Its bytes are those of the weights,
and of the K and V of all sequences, at the bandwidth of a large copy. The target on an H200 at 64 sequences is 1.5
times their time. The other bound is one replay of transformers' own modules without attention, captured in a graph,
plus K and V. Fewer and larger kernels would gain the difference of the two.

Then requests that arrive together are served: tokens a second, milliseconds to the first token and between two tokens,
beside transformers' `generate_batch` (continuous batching). Their bound is a step at the second bound for each token of
an answer, with sequences of half the answer on top of the prompt; it leaves the prompts' own computation out.

The model has Qwen3-0.6B's shape and random weights. Before anything counts, the answers are compared: where two part,
a forward of the request alone in fp32 says how far each token's logit is from the best. kvpage's must lie within
rounding (serving_tokens.py). Steps are medians with quartiles.

On a CPU it shows that it runs, with --device cpu --shape tiny and small numbers: nothing is captured there.
"""

import argparse
import functools
import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, get_args

import numpy as np
import torch
import transformers as tf

from kvpage.benchmarks.cells import Row, shown
from kvpage.benchmarks.figure import Figure, within
from kvpage.benchmarks.hf_ways import batched, generation, has_batches
from kvpage.benchmarks.pictures import add_curves, drawn
from kvpage.benchmarks.script import DEVICE, WITHOUT, finish, option, parse
from kvpage.benchmarks.serving_step_bound import copy_bandwidth, step_bound
from kvpage.benchmarks.serving_tokens import TokenJudge, compare_answers
from kvpage.benchmarks.serving_workloads import Prompts, Served, Tokens, Workload, engine_for, random_prompts
from kvpage.serving import Engine, SamplingParams
from kvpage.serving.config import AttentionBackendName

SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": {
        "vocab_size": 151936, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
        "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
    },
    "tiny": {
        "vocab_size": 256, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16,
    },
}  # fmt: skip
BATCHED_TOKENS = 4096
TARGET_SEQS, TARGET = 64, 1.5
STEPS = 24  # of a batch, of which the first ones warm up
STEP_COLUMNS = (
    "{seqs:>6} {context:>8} {step ms:>22.2f} {model ms:>9.2f} {bound ms:>9.2f} {bytes ms:>9.2f} {over bytes:>20.2f}  "
    "{attention:<12} {replays:>7} {is_met:>7}"
)
SERVED_COLUMNS = (
    "{name:<16} {tokens/s:>24.1f} {ttft ms:>20.1f} {ttft p99 ms.median:>18.1f} {between ms:>18.1f} "
    "{between p99 ms.median:>21.1f} {parted:>7}"
)
COPY_BYTES = {"cuda": 512 << 20, "cpu": 1 << 20}


class Moments(NamedTuple):
    """tokens: of each request. begin: when all were asked for. times: of each request's tokens, on the same clock."""

    tokens: Tokens
    begin: float
    times: list[list[float]]

    @property
    def seconds(self) -> float:
        return max(map(max, self.times)) - self.begin

    def summary(self) -> dict[str, float]:
        """Return tokens a second; milliseconds to the first token and between two, as median and 99th percentile."""
        first = [1e3 * (each[0] - self.begin) for each in self.times]
        between = [1e3 * (b - a) for each in self.times for a, b in itertools.pairwise(each)] or [0.0]
        summary = {"tokens/s": sum(map(len, self.tokens)) / self.seconds}
        for name, values in (("ttft", first), ("between", between)):
            summary[f"{name} ms"], summary[f"{name} p99 ms"] = np.percentile(values, (50, 99)).tolist()
        return summary


def serve_kvpage(engine: Engine, prompts: Prompts, max_tokens: int) -> Moments:
    """Ask for all at once, and step until all are answered."""
    engine.reset_prefix_cache()
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    begin = time.perf_counter()
    tokens: dict[str, list[int]] = {engine.add_request(prompt, params): [] for prompt in prompts}
    times: dict[str, list[float]] = {request_id: [] for request_id in tokens}
    while engine.has_unfinished:
        outputs = engine.step()
        now = time.perf_counter()
        for output in outputs:
            if output.token_id is None:
                raise SystemExit(f"kvpage ended a request: {output.error}")
            tokens[output.request_id].append(output.token_id)
            times[output.request_id].append(now)
    return Moments(list(tokens.values()), begin, list(times.values()))


def serve_generate_batch(model: Any, batched_tokens: int, prompts: Prompts, max_tokens: int) -> Moments:
    """Serve by transformers' continuous batching. It captures graphs before the first request; that is not counted."""
    is_cuda = model.device.type == "cuda"
    outputs = batched(model, prompts, generation(max_tokens), batched_tokens, record_timestamps=True, warmup=is_cuda)
    begin = min(output.created_time for output in outputs)
    return Moments([list(one.generated_tokens) for one in outputs], begin, [list(one.timestamps) for one in outputs])


def make_model(shape: str, device: str) -> Any:
    config = tf.Qwen3Config(
        **SHAPES[shape], max_position_embeddings=40960, tie_word_embeddings=True, initializer_range=0.05,
        pad_token_id=0, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    with torch.device(device):  # random weights are faster made there than carried
        return tf.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=dtype).eval()


def make_engine(model: Any, num_seqs: int, length: int, attention: AttentionBackendName) -> Engine:
    """An engine with room for so many sequences of so many tokens."""
    engine = engine_for(
        model,
        [length] * num_seqs,
        max_num_seqs=num_seqs,
        max_num_batched_tokens=BATCHED_TOKENS,
        attention_backend=attention,
        cudagraph_capture_sizes=[size for size in sorted({1, num_seqs // 2, num_seqs}) if size],
    )
    engine.warmup()
    return engine


def make_prompts(num: int, low: int, high: int, vocab: int) -> Prompts:
    """Random ones of `low` to `high` tokens, without a common prefix."""
    return random_prompts(np.random.default_rng(0).integers(low, high + 1, num).tolist(), vocab, seed=1)


def decode_seconds(engine: Engine, prompts: Prompts, steps: int) -> list[float]:
    """Return the seconds of each step in which all sequences decode."""
    params = SamplingParams(max_tokens=steps + len(prompts) + 1, ignore_eos=True)
    request_ids = [engine.add_request(prompt, params) for prompt in prompts]
    answered: set[str] = set()
    while len(answered) < len(prompts):
        answered.update(output.request_id for output in engine.step())
    taken = []
    for _ in range(steps):
        before = time.perf_counter()
        engine.step()
        taken.append(time.perf_counter() - before)
    for request_id in request_ids:
        engine.abort(request_id)
    return taken[steps // 4 :]


def decode_row(model: Any, num_seqs: int, context: int, bandwidth: float, attention: AttentionBackendName) -> Row:
    engine = make_engine(model, num_seqs, context + STEPS + num_seqs + 1, attention)
    seconds = decode_seconds(engine, make_prompts(num_seqs, context, context, model.config.vocab_size), STEPS)
    bound = step_bound(model, num_seqs, context, bandwidth)
    graphs, over = engine.stats().graphs, Figure.of(seconds, 1 / bound.bytes)
    return {
        "seqs": num_seqs,
        "context": context,
        "attention": engine.attention_backend,
        "replays": graphs.num_replays if graphs else 0,
        "step ms": Figure.of(seconds, 1e3),
        "bytes ms": 1e3 * bound.bytes,
        "over bytes": over,
        "bound ms": 1e3 * bound.seconds,
        "model ms": 1e3 * bound.model,
        "over bound": Figure.of(seconds, 1 / bound.seconds),
        "target": TARGET if num_seqs == TARGET_SEQS else None,
        "is_met": over.median <= TARGET if num_seqs == TARGET_SEQS else None,
    }


def contenders(model: Any, prompts: Prompts, options: argparse.Namespace) -> dict[str, Callable[[], Moments]]:
    engine = make_engine(model, len(prompts), max(map(len, prompts)) + options.tokens, options.attention)
    runs: dict[str, Callable[[], Moments]] = {"kvpage": lambda: serve_kvpage(engine, prompts, options.tokens)}
    if has_batches():
        runs["generate_batch"] = lambda: serve_generate_batch(model, BATCHED_TOKENS, prompts, options.tokens)
    return {name: run for name, run in runs.items() if name not in options.without}


def served(model: Any, options: argparse.Namespace, seconds: float) -> dict[str, Row]:
    """Serve the requests by all in turns, after their answers were compared. seconds: after which no round begins."""
    low, high = options.prompt_tokens // 2, options.prompt_tokens
    prompts = make_prompts(options.requests, low, high, model.config.vocab_size)
    runs = contenders(model, prompts, options)
    first = {name: run() for name, run in runs.items()}
    answers = {name: Served([one.tokens], one.seconds) for name, one in first.items()}
    compared = compare_answers(TokenJudge(model), Workload("separate", [prompts]), answers)
    turns = ({name: run().summary() for name, run in runs.items()} for _ in range(options.rounds))
    rounds = list(within(seconds, turns))
    return {
        name: {key: Figure.of(turn[name][key] for turn in rounds) for key in rounds[0][name]}
        | {"parted": compared[name].num_parted, "max_gap": compared[name].max_gap}
        for name in runs
    }


def served_bound(model: Any, options: argparse.Namespace, bandwidth: float) -> float:
    """Return tokens a second at a step of the bound for each token of an answer, without the prompts."""
    context = (options.prompt_tokens * 3 // 2 + options.tokens) // 2  # prompts are half as long, or as long
    return options.requests / step_bound(model, options.requests, context, bandwidth).seconds


def draw(decodes: Sequence[Row], results: dict[str, Row], path: str) -> None:
    with drawn(path, 1, 2, size=(10, 3.6)) as (left, right):
        add_curves(left, decodes, "seqs", ("step ms", "bound ms", "bytes ms"), ylabel="a decode step", ylim=(0, None))
        right.barh(list(results), [row["tokens/s"].median for row in results.values()])
        right.set(xlabel="generated tokens/s")


def main() -> None:
    options = parse(
        "serving_gpu",
        __doc__,
        rounds=3,
        device=DEVICE._replace(default="cuda"),
        shape=option("qwen3-0.6b", choices=SHAPES),
        attention=option("auto", "attention_backend of EngineConfig", choices=get_args(AttentionBackendName)),
        batches=[1, 8, 64, 256],
        context=option(1024, "tokens of each sequence that decodes"),
        requests=64,
        prompt_tokens=option(1024, "at most; at least half of it"),
        tokens=option(128, "to generate for each request"),
        seconds=option(60.0, "after which nothing further begins"),
        without=WITHOUT,
    )
    tf.logging.set_verbosity_error()
    begin = time.monotonic()
    model = make_model(options.shape, options.device)
    bandwidth = copy_bandwidth(model.device, COPY_BYTES[options.device])
    print(f"copy {bandwidth / 1e9:.0f} GB/s")
    steps = (decode_row(model, num, options.context, bandwidth, options.attention) for num in options.batches)
    decodes = shown(STEP_COLUMNS, within(options.seconds, steps))
    results = served(model, options, options.seconds - (time.monotonic() - begin))
    bound = served_bound(model, options, bandwidth)
    print(f"\nbound: {bound:.1f} tokens/s")
    shown(SERVED_COLUMNS, ({"name": name, **row} for name, row in results.items()))
    found = {"copy_gb_per_s": bandwidth / 1e9, "decode": decodes, "served": results, "served_bound": bound}
    finish(options, functools.partial(draw, decodes, results), **found)


if __name__ == "__main__":
    main()
