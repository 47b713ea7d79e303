"""The options of `kvpage bench serve`."""

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from kvpage.benchmarks.arguments import positive
from kvpage.benchmarks.serve_requests import FIRST_ID
from kvpage.benchmarks.serve_summary import MEASURES

STARTED = ("kvpage", "vllm")
"""Names of the servers that --serve and --vllm start."""


def parse(description: str | None, arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options of a command line; sys.argv's without `arguments`. description: for --help."""
    parser = argparse.ArgumentParser(
        prog="kvpage bench serve", description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    servers = parser.add_argument_group("servers")
    servers.add_argument("--url", action="append", default=[], metavar="[NAME=]URL", help="may be given several times")
    servers.add_argument("--model", help="its name; without it, the first that the server names")
    servers.add_argument("--api-key", default=os.environ.get("OPENAI_API_KEY"), help="default: OPENAI_API_KEY")
    servers.add_argument(
        "--serve", choices=("tiny", "small", "large"), help="start kvpage's server over a random model"
    )
    servers.add_argument("--compare", action="store_true", help="with --serve: the Engine and the AsyncEngine, too")
    servers.add_argument("--vllm", type=Path, metavar="PYTHON", help="with --serve: vLLM's server, by this interpreter")
    servers.add_argument("--threads", type=positive, default=2, help="of each server that is started")
    servers.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    load = parser.add_argument_group("load")
    load.add_argument("--dataset", choices=("random", "sharegpt", "prefix", "trace"), default="random")
    load.add_argument("--trace", type=Path, help="a Mooncake trace, for --dataset trace")
    load.add_argument("--scale", type=share, default=1.0, help="of a trace's lengths, at most 1")
    load.add_argument("--num-requests", type=positive, default=64)
    load.add_argument("--rate", type=rate, help="requests a second, by a Poisson process; inf: all at once")
    load.add_argument("--concurrency", type=positive, help="most that are open; default 64 without --rate and --trace")
    load.add_argument("--input-len", type=positive, default=128)
    load.add_argument("--output-len", type=positive, default=32)
    load.add_argument("--prefix-len", type=positive, default=256)
    load.add_argument("--num-prefixes", type=positive, default=4)
    load.add_argument("--vocab", type=vocabulary, default=1000, help="token ids are less")
    load.add_argument("--abort-share", type=share, default=0.0, help="clients that go away before their answer's end")
    load.add_argument("--timeout", type=above_zero, default=600.0, help="seconds, after which a request has failed")
    load.add_argument("--endpoint", choices=("completions", "chat"), default="completions")
    load.add_argument("--plain", action="store_true", help="send no field that OpenAI's API lacks, such as ignore_eos")
    load.add_argument("--seed", type=natural, default=0, help="of the first round; the next have the next ones")
    shown = parser.add_argument_group("measurement")
    shown.add_argument("--rounds", type=positive, default=1, help="turns of each server, with other tokens in each")
    shown.add_argument(
        "--goodput", nargs="+", type=limit, default=[], metavar="MEASURE:MS", help="ttft, tpot, itl or e2e"
    )
    shown.add_argument("--plot", metavar="PATH")
    args = parser.parse_args(arguments)
    if not args.serve and not args.url:
        parser.error("--url or --serve must be given")
    if (args.compare or args.vllm) and not args.serve:
        parser.error("--compare and --vllm need --serve")
    if (args.dataset == "trace") != (args.trace is not None):
        parser.error("--dataset trace and --trace must be given together")
    if args.serve and any(url.startswith(tuple(f"{name}=" for name in STARTED)) for url in args.url):
        parser.error("--url must not be named kvpage or vllm with --serve")
    if args.compare and (args.rate or args.trace or args.abort_share):
        parser.error("--compare excludes --rate, --trace and --abort-share: the Engine runs all requests at once")
    return args


def natural(text: str) -> int:
    """Return an integer, at least 0."""
    number = int(text)
    if number < 0:
        raise argparse.ArgumentTypeError(f"it must not be negative, got {text!r}")
    return number


def vocabulary(text: str) -> int:
    """Return a number above the ids of special tokens."""
    number = positive(text)
    if number <= FIRST_ID:
        raise argparse.ArgumentTypeError(f"it must be more than {FIRST_ID}, got {text!r}")
    return number


def share(text: str) -> float:
    """Return a number in [0, 1]."""
    number = float(text)
    if not 0 <= number <= 1:
        raise argparse.ArgumentTypeError(f"it must be in [0, 1], got {text!r}")
    return number


def rate(text: str) -> float:
    """Return a positive number, or infinity."""
    number = float(text)
    if not number > 0:
        raise argparse.ArgumentTypeError(f"it must be positive, got {text!r}")
    return number


def above_zero(text: str) -> float:
    """Return a positive, finite number."""
    number = rate(text)
    if number == float("inf"):
        raise argparse.ArgumentTypeError(f"it must be finite, got {text!r}")
    return number


def limit(text: str) -> tuple[str, float]:
    """Return a measure and its milliseconds, of text such as ttft:500."""
    name, _, most = text.partition(":")
    if name not in MEASURES:
        raise argparse.ArgumentTypeError(f"it must name one of {', '.join(MEASURES)}, got {text!r}")
    return name, above_zero(most)
