"""How many requests does a server of OpenAI's API answer, and how soon? A load test against any URL, or several.

With --serve it starts kvpage's server over a random model. With --compare the Engine runs the same requests in that
server's process, without HTTP, and so does the AsyncEngine. The Engine's time is the bound: HTTP can only add to it.
With --vllm PYTHON, vLLM's server stands beside it, over the same weights. So do servers of --url. All take turns, in
another order each round, so that a noisy moment meets them all. With --serve, a round before the first does not count.

Before anything is measured, each server is asked for one prompt twice and once as a stream. The numbers of usage must
add up. Texts that differ are named; of a server that --serve has started they are refused. With --compare, texts that
differ from the Engine's are counted. Requests that fail are counted and named; they are in no other number.

    random     prompts of --input-len tokens, each of its own
    sharegpt   lengths as chats have them
    prefix     --num-prefixes prefixes of --prefix-len tokens, then --input-len of each prompt's own
    trace      a Mooncake trace, see --trace; at its times, unless --rate is given

With --rate requests arrive by a Poisson process, whether the server keeps up or not. --rate inf sends them at once.
--concurrency is the most that are open; others wait, and their times count from the arrival. Prompts are token ids.
With --endpoint chat they are words.
"""

import argparse
import asyncio
import functools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from random import Random

from kvpage.benchmarks.cells import Row
from kvpage.benchmarks.figure import Figure
from kvpage.benchmarks.script import finish
from kvpage.benchmarks.serve_checks import WrongAnswer, check, find_model
from kvpage.benchmarks.serve_client import ServeClient, ServeError
from kvpage.benchmarks.serve_load import Outcome, Target, run_load
from kvpage.benchmarks.serve_options import STARTED, serve_options
from kvpage.benchmarks.serve_process import start_servers
from kvpage.benchmarks.serve_report import plot, show, summarize
from kvpage.benchmarks.serve_requests import (
    ServeRequest,
    Shape,
    make_requests,
    requests_of_trace,
    with_arrivals,
    with_leavers,
)
from kvpage.tools.replay import TraceError, read_trace

LOCAL, OWN = ("engine", "live"), "kvpage"
SETTLE_SECONDS = 0.3  # threads of the one before may spin until then
CHECKED_TOKENS = 16  # of the answer that the gate asks for
DEFAULT_OPEN = 64  # requests
Targets = Mapping[str, Target]
Loads = Sequence[Sequence[ServeRequest]]


def loads_of(options: argparse.Namespace) -> Loads:
    """Return the requests of each round: with other tokens in each, so that no cache knows them from before.

    With --serve the first round does not count.
    """
    num_rounds = options.rounds + bool(options.serve)
    return [requests_of(options, options.seed + number) for number in range(num_rounds)]


def requests_of(options: argparse.Namespace, seed: int) -> Sequence[ServeRequest]:
    shape = Shape(options.vocab, options.input_len, options.output_len, options.prefix_len, options.num_prefixes, seed)
    if options.trace is None:
        requests = make_requests(options.dataset, options.num_requests, shape)
    else:
        with options.trace.open() as lines:
            requests = requests_of_trace(read_trace(lines), options.num_requests, shape, options.scale)
        if not requests:
            raise TraceError(f"{options.trace} has no requests")
    if options.rate:
        requests = with_arrivals(requests, options.rate, seed)
    return with_leavers(requests, options.abort_share, seed) if options.abort_share else requests


def concurrency_of(options: argparse.Namespace) -> int | None:
    """Return how many requests are open at most; None for any number."""
    most: int | None = options.concurrency
    return most if most or options.rate or options.trace else DEFAULT_OPEN


def urls_of(options: argparse.Namespace, loads: Loads, stack: ExitStack) -> dict[str, str]:
    """Return the URLs by name; start the servers that are to be started, until the stack ends."""
    named = [url.partition("=") if "=" in url.partition("//")[0] else (url, "=", url) for url in options.url]
    found = {name: url for name, _, url in named}
    if not options.serve:
        return found
    num_seqs = concurrency_of(options) or DEFAULT_OPEN
    longest = sorted((len(one.prompt) + one.max_tokens for requests in loads for one in requests), reverse=True)
    num_blocks = sum(length // 16 + 2 for length in longest[:num_seqs]) + 64
    return start_servers(options, num_blocks, num_seqs, stack) | found


async def target_of(options: argparse.Namespace, name: str, url: str) -> Target:
    client = ServeClient(url, options.api_key, options.timeout)
    is_started = options.serve and name in STARTED
    model = await find_model(name, client, None if is_started else options.model)
    return Target(name, client, model, options.endpoint, () if options.plain else (("ignore_eos", True),))


async def run_local(client: ServeClient, name: str, requests: Sequence[ServeRequest]) -> tuple[float, list[str]]:
    """Let the Engine, or the AsyncEngine, of the server's process run the requests: its seconds, and the texts."""
    asked = {"prompts": [one.prompt for one in requests], "max_tokens": [one.max_tokens for one in requests]}
    said = await client.call("POST", f"/bench/{name}", asked)
    return said["seconds"], said["texts"]


class Measurement:
    """Rounds of all contenders: the servers, and with --compare the two ways without HTTP.

    Args:
        options: Of the command line.
        note: Called at each end of a request.

    Attributes:
        summaries, outcomes, rates: By contender, of all rounds. Those without HTTP have rates alone.
        num_parted: Answers over HTTP whose text is not the Engine's.
    """

    def __init__(self, options: argparse.Namespace, note: Callable[[], object]) -> None:
        self.options, self.note = options, note
        self.summaries: dict[str, list[Row]] = {}
        self.outcomes: dict[str, list[Outcome]] = {}
        self.rates: dict[str, list[float]] = {}
        self.num_parted = 0

    async def round(self, names: Sequence[str], targets: Targets, requests: Sequence[ServeRequest]) -> None:
        """Let each run the requests."""
        texts: dict[str, list[str]] = {}
        for name in names:
            await asyncio.sleep(SETTLE_SECONDS if len(names) > 1 else 0.0)
            if self.options.serve and name in (*LOCAL, OWN):
                await targets[OWN].client.call("POST", "/bench/forget", {})
            if name in LOCAL:
                seconds, texts[name] = await run_local(targets[OWN].client, name, requests)
                self._count(name, sum(one.max_tokens for one in requests) / seconds)
            else:
                outcomes = await run_load(targets[name], requests, concurrency_of(self.options), self.note)
                self._keep(name, outcomes)
                texts[name] = [one.text for one in outcomes]
        if self.options.compare:
            self.num_parted += sum(a != b for a, b in zip(texts["engine"], texts[OWN], strict=True))

    def _keep(self, name: str, outcomes: Sequence[Outcome]) -> None:
        summary = summarize(outcomes, dict(self.options.goodput))
        self.outcomes.setdefault(name, []).extend(outcomes)
        self.summaries.setdefault(name, []).append(summary)
        self._count(name, summary["tokens_per_second"])

    def _count(self, name: str, rate: float) -> None:
        self.rates.setdefault(name, []).append(rate)

    def losses(self) -> dict[str, Figure]:
        """Return the share of the Engine's tokens a second that each other way through the same process lacks."""
        engine = self.rates.get("engine", [])
        ways = {name: self.rates[name] for name in ("live", OWN) if engine}
        return {name: Figure.of(1 - a / b for a, b in zip(taken, engine, strict=True)) for name, taken in ways.items()}


async def measure(options: argparse.Namespace, loads: Loads, urls: Mapping[str, str]) -> Measurement:
    """Check the servers, and measure all rounds; a first one that does not count is left out."""
    targets = {name: await target_of(options, name, url) for name, url in urls.items()}
    for target in targets.values():
        await check_answers(options, target, loads[0][0])
    names = [*(LOCAL if options.compare else ()), *targets]
    with progress(sum(map(len, loads)) * len(targets)) as note:
        for number, requests in enumerate(loads, options.rounds - len(loads)):
            if number <= 0:
                measured = Measurement(options, note)
            Random(number).shuffle(names)
            await measured.round(names, targets, requests)
    return measured


async def check_answers(options: argparse.Namespace, target: Target, request: ServeRequest) -> None:
    """Raise WrongAnswer where a server answers wrongly; name one whose texts differ."""
    short = replace(request, arrival=None, leaves_after=None, max_tokens=min(request.max_tokens, CHECKED_TOKENS))
    if not await check(target, short):
        message = f"{target.name}: the same prompt gives other texts when it is asked again, or as a stream"
        if options.serve and target.name == OWN:
            raise WrongAnswer(message)
        print(message, file=sys.stderr)


@contextmanager
def progress(total: int) -> Iterator[Callable[[], object]]:
    """Give a function to call at each end. It shows a bar on a terminal."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("requests", total=total)
        yield lambda: bar.advance(task)


def main() -> None:
    options = serve_options(__doc__)
    try:
        loads = loads_of(options)
        with ExitStack() as stack:
            measured = asyncio.run(measure(options, loads, urls_of(options, loads, stack)))
    except (OSError, TraceError, WrongAnswer, ServeError, RuntimeError, TimeoutError, ValueError) as error:
        raise SystemExit(f"kvpage bench serve: {error}") from error
    figures, losses = {name: Figure.of(rates) for name, rates in sorted(measured.rates.items())}, measured.losses()
    show(figures, measured.summaries)
    for name, loss in losses.items():
        print(f"{name}: {loss:.1%} below the Engine's tokens a second")
    if measured.num_parted:
        print(f"kvpage: the texts of {measured.num_parted} requests are not the Engine's")
    found = {"tokens_per_second": figures, "loss": losses, "parted": measured.num_parted}
    found |= {"rate": options.rate and str(options.rate), "concurrency": concurrency_of(options)}  # JSON has no inf
    draw = functools.partial(plot, measured.outcomes)
    finish(options, draw, requests=len(loads[0]), **found, rounds=measured.summaries)


if __name__ == "__main__":
    main()
