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
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from random import Random

from kvpage.benchmarks.cells import Row
from kvpage.benchmarks.figure import Figure
from kvpage.benchmarks.script import finish
from kvpage.benchmarks.serve_client import ServeClient, ServeError
from kvpage.benchmarks.serve_load import Outcome, Target, WrongAnswer, check, find_model, run_load
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


def requests_of(options: argparse.Namespace, seed: int) -> Sequence[ServeRequest]:
    """Return the requests of a round. Each seed gives other tokens, so that no cache knows them from before."""
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
    """Return the URLs by name. Servers that are started end with the stack."""
    named = [url.partition("=") if "=" in url.partition("//")[0] else (url, "=", url) for url in options.url]
    urls = {name: url for name, _, url in named}
    if not options.serve:
        return urls
    num_seqs = concurrency_of(options) or DEFAULT_OPEN
    lengths = (len(request.prompt) + request.max_tokens for requests in loads for request in requests)
    num_blocks = sum(length // 16 + 2 for length in sorted(lengths, reverse=True)[:num_seqs]) + 64
    return start_servers(options, num_blocks, num_seqs, stack) | urls


async def target_of(options: argparse.Namespace, name: str, url: str, request: ServeRequest) -> Target:
    """Return a server that answers a request rightly. WrongAnswer where it does not; other texts are named."""
    client = ServeClient(url, options.api_key, options.timeout)
    is_started = options.serve and name in STARTED
    model = await find_model(name, client, None if is_started else options.model)
    target = Target(name, client, model, options.endpoint, () if options.plain else (("ignore_eos", True),))
    short = replace(request, arrival=None, leaves_after=None, max_tokens=min(request.max_tokens, CHECKED_TOKENS))
    if not await check(target, short):
        message = f"{name}: the same prompt gives other texts when it is asked again, or as a stream"
        if options.serve and name == OWN:
            raise WrongAnswer(message)
        print(message, file=sys.stderr)
    return target


class Measurement:
    """Rounds of all contenders: the servers, and with --compare the two ways without HTTP.

    Attributes:
        summaries, outcomes, rates: By contender, of all rounds. The ways without HTTP have rates alone.
        num_parted: Answers over HTTP whose text is not the Engine's.
    """

    def __init__(self, options: argparse.Namespace, note: Callable[[], object]) -> None:
        """note: called at each end of a request."""
        self.options, self.note, self.num_parted = options, note, 0
        self.summaries: dict[str, list[Row]] = defaultdict(list)
        self.outcomes: dict[str, list[Outcome]] = defaultdict(list)
        self.rates: dict[str, list[float]] = defaultdict(list)

    async def round(self, names: Sequence[str], targets: Targets, requests: Sequence[ServeRequest]) -> None:
        """Let each run the requests."""
        texts: dict[str, list[str]] = {}
        for name in names:
            await asyncio.sleep(SETTLE_SECONDS if len(names) > 1 else 0.0)
            if self.options.serve and name in (*LOCAL, OWN):
                await targets[OWN].client.call("POST", "/bench/forget", {})
            if name in LOCAL:
                texts[name] = await self._local(name, targets[OWN].client, requests)
            else:
                texts[name] = await self._remote(name, targets[name], requests)
        if self.options.compare:
            self.num_parted += sum(a != b for a, b in zip(texts["engine"], texts[OWN], strict=True))

    async def _local(self, name: str, client: ServeClient, requests: Sequence[ServeRequest]) -> list[str]:
        """Let the Engine, or the AsyncEngine, of the server's process run the requests."""
        lengths = [request.max_tokens for request in requests]
        asked = {"prompts": [request.prompt for request in requests], "max_tokens": lengths}
        answer = await client.call("POST", f"/bench/{name}", asked)
        self.rates[name].append(sum(lengths) / answer["seconds"])
        return answer["texts"]

    async def _remote(self, name: str, target: Target, requests: Sequence[ServeRequest]) -> list[str]:
        outcomes = await run_load(target, requests, concurrency_of(self.options), self.note)
        summary = summarize(outcomes, dict(self.options.goodput))
        self.outcomes[name] += outcomes
        self.summaries[name].append(summary)
        self.rates[name].append(summary["tokens_per_second"])
        return [outcome.text for outcome in outcomes]

    def losses(self) -> dict[str, Figure]:
        """Return the share of the Engine's tokens a second that each other way through the same process lacks."""
        rates, ways = self.rates, ("live", OWN) if "engine" in self.rates else ()
        return {name: Figure.of(1 - a / b for a, b in zip(rates[name], rates["engine"], strict=True)) for name in ways}


async def measure(options: argparse.Namespace, loads: Loads, urls: Mapping[str, str]) -> Measurement:
    """Check the servers, and measure all rounds; a first one that does not count is left out."""
    targets = {name: await target_of(options, name, url, loads[0][0]) for name, url in urls.items()}
    names = [*(LOCAL if options.compare else ()), *targets]
    with progress(sum(map(len, loads)) * len(targets)) as note:
        for number, requests in enumerate(loads, options.rounds - len(loads)):
            if number <= 0:
                measured = Measurement(options, note)
            Random(number).shuffle(names)
            await measured.round(names, targets, requests)
    return measured


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
    num_rounds = options.rounds + bool(options.serve)  # with --serve the first one does not count
    try:
        loads = [requests_of(options, options.seed + number) for number in range(num_rounds)]
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
    results = {"tokens_per_second": figures, "loss": losses, "parted": measured.num_parted}
    results |= {"rate": options.rate and str(options.rate), "concurrency": concurrency_of(options)}  # JSON has no inf
    draw = functools.partial(plot, measured.outcomes)
    finish(options, draw, requests=len(loads[0]), **results, rounds=measured.summaries)


if __name__ == "__main__":
    main()
