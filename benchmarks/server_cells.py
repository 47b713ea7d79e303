"""Cells of the tables of numbers about servers and rollouts: see number_cells.py for the others."""

from collections.abc import Callable

from kvpage.benchmarks.number_cells import Result, row_of, text

Cell = Callable[[Result], str]
PEERS = {"engine": "`Engine` in the same process", "live": "`AsyncEngine`", "vllm": "vLLM's CPU server over HTTP"}


def over_http() -> tuple[Cell, Cell]:
    """Return the cells of bench_serve: tokens a second over HTTP, and those of the other ways."""

    def beside(result: Result) -> str:
        rates, loss = result["tokens_per_second"], result["loss"]["kvpage"]
        found = [f"{text(rates[name], 0)}: {what}" for name, what in PEERS.items() if name in rates]
        share = "{median:.1f} % ({low:.1f}-{high:.1f})".format(
            **{key: 100 * loss[key] for key in ("median", "low", "high")}
        )
        return "; ".join([*found, f"HTTP lacks {share} of `Engine`'s"])

    return lambda result: f"{text(result['tokens_per_second']['kvpage'], 0)} tokens/s", beside


def handed_over(column: str) -> tuple[Cell, Cell]:
    """Return the cells of bench_prefill_decode while others decode: apart, and by one worker of one or two threads."""

    def cell(result: Result, contender: str) -> str:
        return f"{text(row_of(result, 'results', workers='busy', contender=contender)[column], 0)} ms"

    def beside(result: Result) -> str:
        one, two = (cell(result, name) for name in ("one worker", "one worker, 2 threads"))
        return f"{one}: one worker with one thread; {two}: with both threads"

    return lambda result: cell(result, "apart"), beside


def rolled_out() -> tuple[Cell, Cell]:
    """Return the cells of bench_rollouts: tokens a second by kvpage, and those of transformers and of the bound."""
    names = {
        "generate": "one `generate` over the padded batch, as TRL calls it",
        "generate_batch": "`generate_batch`",
        "bound": "the model's matrix products alone",
    }

    def beside(result: Result) -> str:
        speeds, share = result["tokens_per_s"], result["kvpage_over"]["generate"]
        found = [f"{text(speeds[name], 0)}: {what}" for name, what in names.items() if name in speeds]
        return "; ".join([*found, f"kvpage has {text(share, 1)} times that of `generate`"])

    return lambda result: f"{text(result['tokens_per_s']['kvpage'], 0)} tokens/s", beside
