"""The options of `kvpage bench serve`."""

import argparse
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from kvpage.benchmarks.arguments import positive
from kvpage.benchmarks.script import Options
from kvpage.benchmarks.serve_requests import FIRST_ID
from kvpage.benchmarks.serve_summary import WORDS

STARTED = ("kvpage", "vllm")
"""Names of the servers that --serve and --vllm start."""


def parse(description: str | None, arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options of a command line; sys.argv's without `arguments`. description: for --help."""
    parser = Options("serve", description, rounds=1)
    parser.add_argument("--url", action="append", default=[], metavar="[NAME=]URL", help="may be given several times")
    parser.add("--model", help="its name; without it, the first that the server names")
    parser.add("--api-key", os.environ.get("OPENAI_API_KEY"), help="default: OPENAI_API_KEY")
    parser.add("--serve", choices=("tiny", "small", "large"), help="start kvpage's server over a random model")
    parser.add_argument("--compare", action="store_true", help="with --serve: the Engine and the AsyncEngine, too")
    parser.add("--vllm", type=Path, metavar="PYTHON", help="with --serve: vLLM's server, by this interpreter")
    parser.add_argument("--threads", type=positive, default=2, help="of each server that is started")
    parser.add("--dtype", "fp32", choices=("fp32", "bf16"))
    parser.add("--dataset", "random", choices=("random", "sharegpt", "prefix", "trace"))
    parser.add("--trace", type=Path, help="a Mooncake trace, for --dataset trace")
    parser.add("--scale", 1.0, type=share, help="of a trace's lengths, at most 1")
    parser.add("--num-requests", 64)
    parser.add("--rate", type=rate, help="requests a second, by a Poisson process; inf: all at once")
    parser.add("--concurrency", type=positive, help="most that are open; default 64 without --rate and --trace")
    for name, default in (("input-len", 128), ("output-len", 32), ("prefix-len", 256), ("num-prefixes", 4)):
        parser.add(f"--{name}", default)
    parser.add("--vocab", 1000, type=vocabulary, help="token ids are less")
    parser.add("--abort-share", 0.0, type=share, help="clients that go away before their answer's end")
    parser.add("--timeout", 600.0, type=above_zero, help="seconds, after which a request has failed")
    parser.add("--endpoint", "completions", choices=("completions", "chat"))
    parser.add_argument("--plain", action="store_true", help="send no field that OpenAI's API lacks, as ignore_eos is")
    parser.add("--seed", 0, type=natural, help="of the first round; the next have the next ones")
    parser.add("--goodput", default=[], nargs="+", type=limit, metavar="MEASURE:MS", help="ttft, tpot, itl or e2e")
    options = parser.parse_args(arguments)
    if error := conflict(options):
        parser.error(error)
    return options


def conflict(options: argparse.Namespace) -> str | None:
    """Return what is wrong about the options together."""
    named = tuple(f"{name}=" for name in STARTED)
    rules = {
        "--url or --serve must be given": not options.serve and not options.url,
        "--compare and --vllm need --serve": (options.compare or options.vllm) and not options.serve,
        "--dataset trace and --trace must be given together": (options.dataset == "trace")
        != (options.trace is not None),
        "--url must not be named kvpage or vllm with --serve": options.serve
        and any(url.startswith(named) for url in options.url),
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
rate = checked(float, "be positive", lambda number: number > 0)
above_zero = checked(rate, "be finite", lambda number: number != float("inf"))


def limit(text: str) -> tuple[str, float]:
    """Return a measure and its milliseconds, of text such as ttft:500."""
    name, _, most = text.partition(":")
    if name not in WORDS:
        raise argparse.ArgumentTypeError(f"it must name one of {', '.join(WORDS)}, got {text!r}")
    return name, above_zero(most)
