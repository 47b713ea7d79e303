"""The options of `kvpage bench serve`."""

import argparse
import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from kvpage.benchmarks.script import VLLM, option, parse, positive
from kvpage.benchmarks.serve_report import WORDS
from kvpage.benchmarks.serve_requests import FIRST_ID

STARTED = ("kvpage", "vllm")
"""Names of the servers that --serve and --vllm start."""


def serve_options(about: str | None, arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options of a command line; sys.argv's without `arguments`. about: for --help."""
    return parse(
        "serve",
        about,
        arguments,
        conflict,
        url=option([], "may be given several times", action="append", type=None, nargs=None, metavar="[NAME=]URL"),
        model=option(None, "its name; without it, the first that the server names"),
        api_key=option(os.environ.get("OPENAI_API_KEY"), "default: OPENAI_API_KEY"),
        serve=option(None, "start kvpage's server over a random model", choices=("tiny", "small", "large")),
        compare=option(False, "with --serve: the Engine and the AsyncEngine, too"),
        vllm=VLLM,
        threads=option(2, "of each server that is started"),
        dtype=option("fp32", choices=("fp32", "bf16")),
        dataset=option("random", choices=("random", "sharegpt", "prefix", "trace")),
        trace=option(None, "a Mooncake trace, for --dataset trace", type=Path),
        scale=option(1.0, "of a trace's lengths, at most 1", type=share),
        num_requests=64,
        rate=option(None, "requests a second, by a Poisson process; inf: all at once", type=above_zero),
        concurrency=option(None, "most that are open; default 64 without --rate and --trace", type=positive),
        input_len=128,
        output_len=32,
        prefix_len=256,
        num_prefixes=4,
        vocab=option(1000, "token ids are less", type=vocabulary),
        abort_share=option(0.0, "clients that go away before their answer's end", type=share),
        timeout=option(600.0, "seconds, after which a request has failed", type=limited),
        endpoint=option("completions", choices=("completions", "chat")),
        plain=option(False, "send no field that OpenAI's API lacks, as ignore_eos is"),
        rounds=1,
        seed=option(0, "of the first round; the next have the next ones", type=natural),
        goodput=option([], "ttft, tpot, itl or e2e", type=limit, metavar="MEASURE:MS"),
    )


def conflict(options: argparse.Namespace) -> str | None:
    """Return what is wrong about the options together."""
    named = tuple(f"{name}=" for name in STARTED)
    is_named = any(url.startswith(named) for url in options.url)
    has_trace = options.trace is not None
    rules = {
        "--url or --serve must be given": not options.serve and not options.url,
        "--compare and --vllm need --serve": (options.compare or options.vllm) and not options.serve,
        "--dataset trace and --trace must be given together": (options.dataset == "trace") != has_trace,
        "--url must not be named kvpage or vllm with --serve": options.serve and is_named,
        "--compare excludes --rate, --trace and --abort-share: the Engine runs all requests at once": options.compare
        and (options.rate or options.trace or options.abort_share),
    }
    return next((words for words, is_broken in rules.items() if is_broken), None)


def checked(kind: Callable[[str], float], words: str, is_good: Callable[[float], bool]) -> Callable[[str], float]:
    """Return the type of a number that must be good. words: what it must be."""

    def number(text: str) -> float:
        found = kind(text)
        if not is_good(found):
            raise argparse.ArgumentTypeError(f"it must {words}, got {text!r}")
        return found

    return number


natural = checked(int, "not be negative", lambda number: number >= 0)
vocabulary = checked(positive, f"be more than {FIRST_ID}", lambda number: number > FIRST_ID)
share = checked(float, "be in [0, 1]", lambda number: 0 <= number <= 1)
above_zero = checked(float, "be positive", lambda number: number > 0)
limited = checked(above_zero, "be finite", math.isfinite)


def limit(text: str) -> tuple[str, float]:
    """Return a measure and its milliseconds, of text such as ttft:500."""
    name, _, most = text.partition(":")
    if name not in WORDS:
        raise argparse.ArgumentTypeError(f"it must name one of {', '.join(WORDS)}, got {text!r}")
    return name, limited(most)
