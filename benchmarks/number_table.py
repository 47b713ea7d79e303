"""README.md's table of numbers, made of the results of benchmarks/runs.py. No number is written by hand.

Each is a median, with the quartiles after it.
"""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from kvpage.benchmarks.runs import RUNS

Result = dict[str, Any]
Results = dict[str, Result]


class Number(NamedTuple):
    """One row: its text, what is measured, what it is beside, and the run that gave it."""

    what: str
    measured: Callable[[Result], str]
    beside: Callable[[Result], str]
    run: str


def table(results: Results) -> str:
    """Args: results: the line of JSON of each run, by name."""
    lines = ["| what | median (quartiles) | beside | command |", "|---|---|---|---|"]
    last = ""
    for number in NUMBERS:
        result = results[number.run]
        command = "" if number.run == last else f"`python {' '.join(RUNS[number.run].arguments)}`"
        lines.append(f"| {number.what} | {number.measured(result)} | {number.beside(result)} | {command} |")
        last = number.run
    return "\n".join(lines)


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


def served(workload: str, name: str) -> Callable[[Result], str]:
    return lambda result: f"{text(row_of(result, 'results', workload=workload)['tokens_per_s'][name], 0)} tokens/s"


PEERS = {
    "generate_copies": "`generate` with a copy of the prefix's cache for each",
    "generate_prefix": "one `generate` over the prefix's cache",
    "generate": "`model.generate`",
    "generate_batch": "`generate_batch`",
    "vllm": "vLLM's CPU build",
    "bound": "its matrix products",
}


def peers(workload: str) -> Callable[[Result], str]:
    def beside(result: Result) -> str:
        found = row_of(result, "results", workload=workload)["tokens_per_s"]
        return "; ".join(f"{text(found[name], 0)}: {peer}" for name, peer in PEERS.items() if name in found)

    return beside


def generated(num_prefix: int, name: str) -> Callable[[Result], str]:
    """Of bench_generate_cache, one row at a time."""

    def cell(result: Result) -> str:
        return f"{text(row_of(result, 'results', prefix=num_prefix, batch=1)[f'{name} ms'], 0)} ms"

    return cell


def generated_beside(num_prefix: int, *names: str) -> Callable[[Result], str]:
    said = {"prefix for nothing": "the prefix for nothing", "generate": "without it"}
    return lambda result: "; ".join(f"{generated(num_prefix, name)(result)}: {said[name]}" for name in names)


def first_token(method: str, ratio: float | None) -> Callable[[Result], str]:
    return lambda result: f"{text(row_of(result, 'speed', method=method, ratio=ratio)['seconds'])} s"


def first_token_beside(result: Result) -> str:
    full, prefix = (row_of(result, "speed", method=method) for method in ("full", "prefix"))
    ceiling = full["seconds"]["median"] / row_of(result, "speed", method="blend", ratio=0.15)["ceiling"]
    return (
        f"{text(full['seconds'])} s: full recompute; {text(prefix['seconds'])} s: the first segment cached; "
        f"{ceiling:.2f} s: by its arithmetic"
    )


def lost(method: str, ratio: float = 0.15, check: tuple[int, ...] = (1,)) -> Callable[[Result], str]:
    def cell(result: Result) -> str:
        row = row_of(result, "quality", method=method, ratios=[ratio], check=list(check))
        mean, low, high = (100 * value for value in row["lost"])
        return f"{mean:.1f} ({low:.1f}-{high:.1f})"

    return cell


def quality_beside(result: Result) -> str:
    others = {
        "plain reuse": lost("v", 0.0),
        "a check layer chooses": lost("v at seams"),
        "that, without `seam`": lost("v"),
    }
    others |= {"random tokens": lost("random"), "an oracle": lost("oracle deviation")}
    return "0: full recompute; " + "; ".join(f"{cell(result)}: {name}" for name, cell in others.items())


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


NUMBERS: list[Number] = [
    Number("pool: allocate and release 100 blocks, each", pool_cell(100), pool_beside(100), "pool"),
    Number("pool: `allocate(1)` and release", pool_cell(1), pool_beside(1), "pool"),
    Number("pool: `allocate_one` and release", pool_cell("one"), pool_beside("one"), "pool"),
    Number(
        "prefix tree: match a prompt of 8,192 tokens, 6,144 cached",
        tree("match_us"),
        tree_beside(match_memcmp_us="memcmp, all in cache"),
        "prefix",
    ),
    Number(
        "the same prompts wholly cached, cold in the CPU's cache",
        tree("cold_match_us"),
        tree_beside(cold_memcmp_us="memcmp, piece by piece", cold_flat_us="one memcmp over all"),
        "prefix",
    ),
    Number("insert its last 2,048 tokens", tree("insert_after_us"), lambda _: "", "prefix"),
    Number("match one prompt of 131,072 tokens", tree("long_match_us"), tree_beside(long_memcmp_us="memcmp"), "prefix"),
    Number("append a block to a conversation of up to 32,768 tokens", tree("append_us"), lambda _: "", "prefix"),
    Number("evict a block among 50,000 leaves", tree("evict_50k_us"), tree_beside(evict_1k_us="among 1,000"), "prefix"),
    Number(
        "match 8,192 tokens from two threads, from four",
        threads("match of 8,192", 2),
        threads("match of 8,192", 4),
        "prefix",
    ),
    Number(
        "whole-sequence slots: alloc and free",
        us("rows", what="alloc and free"),
        lambda r: f"{text(row_of(r, 'rows', what='alloc and free')['bound_us'])} us: a Python list",
        "slots",
    ),
    Number(
        "find a prompt of 8,192 tokens among 100, 6,144 shared", us("rows", what="find, int32"), slots_beside, "slots"
    ),
    Number("token trie: add 8,192 tokens", *trie("DynamicTokenTrie, no K and V"), "token_trie"),
    Number("the same with K and V", *trie("DynamicTokenTrie, K and V"), "token_trie"),
    Number(
        "hash and pack the events of a block, cached and evicted, 512 at once",
        lambda r: f"{text(row_of(r, 'rows', batch=512)['packed'])} us",
        lambda r: f"{text(row_of(r, 'rows', batch=512)['sha256'])} us: SHA-256 alone",
        "events",
    ),
    Number(
        "swap 4,096 scattered blocks of 8 layers, host to host",
        lambda r: f"{text(r['results']['separate']['scattered']['gb_per_s'], 1)} GB/s",
        lambda r: f"{text(r['results']['separate']['copy_']['gb_per_s'], 1)} GB/s: one `copy_`",
        "swap_host",
    ),
    Number(
        "write and gather 32,768 tokens of Llama-3-8B's shape, bf16, one thread: NHD, HND, `paged`",
        speeds(ROWS, is_plain),
        shares(ROWS, is_plain),
        "reshape_gather_one_thread",
    ),
    Number("the same in fp8 and int8", speeds(ROWS, is_8bit), shares(ROWS, is_8bit), "reshape_gather_one_thread"),
    Number(
        "chunks of 8,192 tokens, all layers in one call",
        speeds(CHUNKS, lambda _: True),
        shares(CHUNKS, lambda _: True),
        "reshape_gather_one_thread",
    ),
    Number("two threads, 32,768 tokens, bf16", speeds(ROWS, is_plain), shares(ROWS, is_plain), "reshape_gather"),
    Number("two threads, fp8 and int8", speeds(ROWS, is_8bit), shares(ROWS, is_8bit), "reshape_gather"),
    Number(
        "store: blocks into the memory tier, 256 MiB, digests made, one thread",
        stored("memory store"),
        store_bound("memory store"),
        "store",
    ),
    Number("and back, digests checked", stored("memory retrieve"), store_bound("memory retrieve"), "store"),
    Number(
        "into the disk tier, in the page cache",
        stored("disk store"),
        store_bound("disk store", "disk gathered"),
        "store",
    ),
    Number("and back", stored("disk retrieve"), store_bound("disk retrieve"), "store"),
    Number("into Redis", stored("redis store"), store_bound("redis store"), "store"),
    Number("and back", stored("redis retrieve"), store_bound("redis retrieve"), "store"),
    Number(
        "look up a prompt of 16,384 tokens",
        lambda r: f"{text(row_of(r, 'results', operation='lookup 16k')['us'], 0)} us",
        lambda r: f"{text(row_of(r, 'results', operation='lookup 16k')['bound us'], 0)} us: SHA-256",
        "store",
    ),
    Number(
        "into the disk tier, two threads",
        stored("disk store"),
        store_bound("disk store", "disk gathered"),
        "store_two_threads",
    ),
    Number("and back", stored("disk retrieve"), store_bound("disk retrieve"), "store_two_threads"),
    Number(
        "serve 32 requests without a shared prefix, Llama of 8 layers, fp32, two threads",
        served("separate", "kvpage"),
        peers("separate"),
        "serving",
    ),
    Number(
        "serve 32 requests with a shared prefix of 1,024 tokens", served("shared", "kvpage"), peers("shared"), "serving"
    ),
    Number(
        "`model.generate` over `KVPageCache`, 1,024 of 1,056 prompt tokens found, 32 generated; CPU time of one thread",
        generated(1024, "prefix found"),
        generated_beside(1024, "prefix for nothing", "generate"),
        "generate_cache",
    ),
    Number(
        "the same, nothing found",
        generated(1024, "nothing found"),
        generated_beside(1024, "generate"),
        "generate_cache",
    ),
    Number(
        "128 of 160 prompt tokens found",
        generated(128, "prefix found"),
        generated_beside(128, "prefix for nothing", "generate"),
        "generate_cache",
    ),
    Number(
        "the same, nothing found", generated(128, "nothing found"), generated_beside(128, "generate"), "generate_cache"
    ),
    Number(
        "first token of 2,080 tokens, 15 % of the reused ones computed again, Llama of 16 layers, fp32, one thread",
        first_token("blend", 0.15),
        first_token_beside,
        "blend_speed_2048",
    ),
    Number(
        "to warm a segment of 512 tokens, once",
        lambda r: f"{text(r['warming']['measured'])} s",
        lambda r: f"{text(r['warming']['alone'])} s: without its sensitivity",
        "blend_speed_2048",
    ),
    Number("first token of 4,128 tokens", first_token("blend", 0.15), first_token_beside, "blend_speed_4096"),
    Number(
        "answers lost to blending at 15 %, of 100, a Llama of 6 layers, one training, 80 documents (95 % interval)",
        lost("behind itself", check=(0,)),
        quality_beside,
        "blend_quality",
    ),
]
