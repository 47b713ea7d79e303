"""The cells of the tables of numbers: functions from a result of benchmarks/runs.py to a cell's text."""

from collections.abc import Callable, Iterable
from typing import Any

Result = dict[str, Any]


def text(figure: dict[str, float], digits: int = 2) -> str:
    """Of a figure from JSON: "3.35 (3.30-3.52)"."""
    return "{median:,.{n}f} ({low:,.{n}f}-{high:,.{n}f})".format(
        **{key: figure[key] for key in ("median", "low", "high")}, n=digits
    )


def row_of(result: Result, rows: str, **wanted: Any) -> Result:
    """The one row that has these values."""
    (row,) = (row for row in result[rows] if all(row.get(key) == value for key, value in wanted.items()))
    return row


def span(figures: Iterable[dict[str, float]], digits: int = 2) -> str:
    """From the least to the largest median of many rows."""
    medians = sorted(figure["median"] for figure in figures)
    return f"{medians[0]:.{digits}f} to {medians[-1]:.{digits}f}"


def moved(result: Result, operations: tuple[str, ...], is_wanted: Callable[[str], bool]) -> list[Result]:
    """Rows of bench_reshape_gather over large inputs, of these operations and kinds of cache."""
    return [
        row for row in result["results"]
        if row["operation"] in operations and is_wanted(row["case"]) and row["tokens"] >= 8192
    ]  # fmt: skip


def speeds(operations: tuple[str, ...], is_wanted: Callable[[str], bool]) -> Callable[[Result], str]:
    return lambda result: f"{span((row['GB/s'] for row in moved(result, operations, is_wanted)), 0)} GB/s"


def shares(operations: tuple[str, ...], is_wanted: Callable[[str], bool]) -> Callable[[Result], str]:
    return lambda result: f"{span(row['of copy'] for row in moved(result, operations, is_wanted))} of one `copy_`"


ROWS, CHUNKS = ("reshape_and_cache", "gather_cache"), ("store_chunk device", "load_chunk device")


def is_plain(case: str) -> bool:
    return case.endswith("bfloat16") and not case.startswith("DeepSeek")


def is_8bit(case: str) -> bool:
    return "bfloat16" not in case


def us(rows: str, beside: str = "", **wanted: Any) -> Callable[[Result], str]:
    """Microseconds of a row of bench_slots, and what they are beside."""
    return lambda result: f"{text(row_of(result, rows, **wanted)['us'])} us{beside}"


def slots_beside(result: Result) -> str:
    row = row_of(result, "rows", what="find, int32")
    return f"{text(row['bound_us'])} us: memcmp; {text(row['python_us'], 0)} us: a trie of dicts"


def trie(what: str) -> tuple[Callable[[Result], str], Callable[[Result], str]]:
    def beside(result: Result) -> str:
        row = row_of(result, "rows", what=what)
        made = "bare nodes and clones" if what.endswith(", K and V") else "bare nodes"
        bound = f"{text(row['bound_ms'], 1)} ms: {made}"
        return bound + (f"; {text(row['quadratic_ms'], 0)} ms: stamping all ancestors" if "quadratic_ms" in row else "")

    return lambda result: f"{text(row_of(result, 'rows', what=what)['ms'], 1)} ms", beside


def stored(operation: str) -> Callable[[Result], str]:
    return lambda result: f"{text(row_of(result, 'results', operation=operation)['GB/s'], 1)} GB/s"


def store_bound(*operations: str) -> Callable[[Result], str]:
    def beside(result: Result) -> str:
        rows = [row_of(result, "results", operation=operation) for operation in operations]
        return "; ".join(f"{text(row['bound GB/s'], 1)}: {row['bound']}" for row in rows)

    return beside


def paged(operation: str, num_tokens: int) -> tuple[Callable[[Result], str], Callable[[Result], str]]:
    """Return the cells of bench_bytes, for records of so many tokens."""

    def row(result: Result) -> Result:
        return row_of(result, "results", operation=operation, tokens=num_tokens)

    def beside(result: Result) -> str:
        found = row(result)
        blocks = f"{text(found['of blocks'])} of the same blocks through a `KVStore`"
        return f"{blocks}; {text(found['bound GB/s'], 1)}: {found['bound']}"

    return lambda result: f"{text(row(result)['GB/s'], 1)} GB/s", beside


def manager(what: str) -> tuple[Callable[[Result], str], Callable[[Result], str]]:
    """Return the cells of bench_block_manager."""
    beside = {"numpy copy": "a copy of the arrays", "numpy's conversion": "numpy's conversion of the list"}

    def bound(result: Result) -> str:
        row = row_of(result, "rows", what=what)
        return f"{text(row['bound us'])} us: {beside.get(row['bound'], row['bound'])}"

    return us("rows", what=what), bound


def sampled(vocab: int, rules: str) -> tuple[Callable[[Result], str], Callable[[Result], str]]:
    """Return the cells of bench_sampling for 256 rows."""
    names = {"torch": "by torch's operations", "vllm": "vLLM's sampler", "bound": "reading the logits once"}

    def row(result: Result) -> Result:
        return row_of(result, "rows", num_rows=256, vocab_size=vocab, rules=rules)

    def beside(result: Result) -> str:
        found = row(result)
        return "; ".join(f"{text(found[name])} ms: {what}" for name, what in names.items() if name in found)

    return lambda result: f"{text(row(result)['sample'])} ms", beside


def mixed(operation: str) -> tuple[Callable[[Result], str], Callable[[Result], str]]:
    """Return the cells of bench_blend_ops: ms of all layers, and the time in copies."""
    return (
        lambda result: f"{text(row_of(result, 'results', operation=operation)['ms'], 1)} ms",
        lambda result: f"{text(row_of(result, 'results', operation=operation)['copies'])} of a `copy_` of all K and V",
    )


MAX_ROUNDING = 0.25
"""Of logits around 4 in bf16, for results that do not say it."""


def served(workload: str, name: str) -> Callable[[Result], str]:
    return lambda result: f"{text(row_of(result, 'results', workload=workload)['tokens_per_s'][name], 0)} tokens/s"


PEERS = {
    "kvpage_preloaded": "kvpage with an allocator preloaded",
    "generate_copies": "a `generate` for each over the prefix's cache",
    "generate_prefix": "one `generate` over the prefix's cache",
    "generate_kept": "`generate` over a cache kept between the turns",
    "generate": "`model.generate`",
    "generate_batch": "`generate_batch`",
    "bound": "the model's matrix products alone",
}


def peers(workload: str) -> Callable[[Result], str]:
    def beside(result: Result) -> str:
        row = row_of(result, "results", workload=workload)
        found = row["tokens_per_s"]
        cells = [f"{text(found[name], 0)}: {peer}" for name, peer in PEERS.items() if name in found]
        return "; ".join([*vllm_beside(row), *cells])

    return beside


def vllm_beside(row: Result) -> list[str]:
    """Return vLLM's speed, kvpage's beside it, and vLLM's error if rounding does not explain it.

    Nothing if it was not measured.
    """
    if "vllm" not in row["tokens_per_s"]:
        return []
    speed, share = row["tokens_per_s"]["vllm"], row["kvpage_over"]["vllm"]
    gap = row.get("max_gap", {}).get("vllm", 0.0)
    is_wrong = gap > row.get("max_rounding", MAX_ROUNDING)
    error = f", and whose tokens lie up to {gap:.2f} below the best logit" if is_wrong else ""
    return [f"{text(speed, 0)}: vLLM's CPU build, of which kvpage has {text(share)}{error}"]


def generated(num_prefix: int, name: str) -> Callable[[Result], str]:
    """Of bench_generate_cache, one row at a time."""

    def cell(result: Result) -> str:
        return f"{text(row_of(result, 'results', prefix=num_prefix, batch=1)[f'{name} ms'], 0)} ms"

    return cell


def generated_beside(num_prefix: int, *names: str) -> Callable[[Result], str]:
    said = {"prefix for nothing": "if the prefix cost nothing", "generate": "without kvpage"}
    return lambda result: "; ".join(f"{generated(num_prefix, name)(result)}: {said[name]}" for name in names)


def first_token(method: str, ratio: float | None) -> Callable[[Result], str]:
    return lambda result: f"{text(row_of(result, 'speed', method=method, ratio=ratio)['seconds'])} s"


def first_token_beside(result: Result) -> str:
    full, prefix = (row_of(result, "speed", method=method) for method in ("full", "prefix"))
    ceiling = full["seconds"]["median"] / row_of(result, "speed", method="blend", ratio=0.15)["ceiling"]
    return (
        f"{text(full['seconds'])} s: full recompute; {text(prefix['seconds'])} s: the first segment cached; "
        f"{ceiling:.2f} s: the least that its arithmetic takes"
    )


def lost(method: str, ratio: float = 0.15, check: tuple[int, ...] = (1,)) -> Callable[[Result], str]:
    def cell(result: Result) -> str:
        row = row_of(result, "quality", method=method, ratios=[ratio], check=list(check))
        mean, low, high = (100 * value for value in row["lost"])
        return f"{mean:.1f} ({low:.1f}-{high:.1f})"

    return cell


def right(method: str, ratio: float, check: tuple[int, ...] = (1,)) -> Callable[[Result], str]:
    def cell(result: Result) -> str:
        row = row_of(result, "quality", method=method, ratios=[ratio], check=list(check))
        return f"{100 * row['all'][0]:.1f} %"

    return cell


LOSSES = {
    "plain reuse": lost("v", 0.0),
    "chosen by a check layer": lost("v at seams"),
    "by a check layer without `seam`": lost("v"),
    "random tokens": lost("random"),
    "an oracle": lost("oracle deviation"),
}


def losses(*names: str) -> Callable[[Result], str]:
    """Lost answers of full recompute, which are none, and of these methods of LOSSES."""
    return lambda result: "; ".join(["0: full recompute", *(f"{LOSSES[name](result)}: {name}" for name in names)])


def pool_cell(batch: int | str, kind: str = "pool") -> Callable[[Result], str]:
    """Nanoseconds of a cycle; of a batch, of each block."""

    def cell(result: Result) -> str:
        figure = row_of(result, "rows", batch=batch)[f"{kind}_ns"]
        num_blocks = batch if isinstance(batch, int) else 1
        each = {name: figure[name] / num_blocks for name in ("median", "low", "high")}
        return f"{text(each, 1 if num_blocks > 1 else 0)} ns"

    return cell


def pool_beside(batch: int | str) -> Callable[[Result], str]:
    peers = {"array": "slices of a numpy array", "list": "a Python list"}
    return lambda result: "; ".join(f"{pool_cell(batch, kind)(result)}: {peer}" for kind, peer in peers.items())


def tree(key: str) -> Callable[[Result], str]:
    return lambda result: f"{text(result[key])} us"


def tree_beside(**bounds: str) -> Callable[[Result], str]:
    return lambda result: "; ".join(f"{text(result[key])} us: {what}" for key, what in bounds.items())


def threads(case: str, num: int) -> Callable[[Result], str]:
    return lambda result: f"{text(row_of(result, 'threads', case=case, threads=num)['ratio'])} of one thread"
