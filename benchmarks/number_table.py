"""The tables of numbers, made of the results of benchmarks/runs.py. No number is written by hand.

docs/benchmarks.md has all rows, README.md those with a headline. Each number is a median, with the quartiles after it.
A row finds its values in a result; its cells are templates over them (benchmarks/cells.py).
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from kvpage.benchmarks.cells import fill, fill_known, markdown
from kvpage.benchmarks.figure import Figure
from kvpage.benchmarks.runs import RUNS, SERVED

Row = dict[str, Any]
Result = dict[str, Any]
Results = dict[str, Result]
Find = Callable[[Result], Row]
NOT_MEASURED = "not measured yet"


class Number(NamedTuple):
    """One row.

    Args:
        run: the name of the run that gave it.
        what: its words in the full table.
        find: returns the values of its cells, of the run's result.
        measured: the template of the cell with the number.
        beside: the template of the cell with bounds and peers; parts whose values are missing are left out.
    """

    run: str
    what: str
    find: Find
    measured: str
    beside: str

    def cells(self, result: Result, beside: str | None = None) -> list[str]:
        """Return the cell with the number, and the one with what is beside it. beside: another template for that."""
        row = self.find(result)
        return [fill(self.measured, row), fill_known(self.beside if beside is None else beside, row)]


def measured_numbers(results: Results) -> list[Number]:
    """Return the rows whose run has a result."""
    return [number for number in NUMBERS if number.run in results]


def full_table(results: Results) -> str:
    """Return all rows, with the commands that gave them.

    Args:
        results: the line of JSON of each run, by name.
    """
    rows, last = [], ""
    for number in measured_numbers(results):
        command = "" if number.run == last else f"`python {' '.join(RUNS[number.run].arguments)}`"
        rows.append([number.what, *number.cells(results[number.run]), command])
        last = number.run
    return markdown(["measured", "median (quartiles)", "beside", "command"], rows)


def short_table(results: Results) -> str:
    """Return the rows with a headline, also those whose run has no result.

    Args:
        results: the line of JSON of each run, by name.
    """
    rows = [[headline, *_short_cells(number, results)] for number, headline in headlines()]
    lines = markdown(["measured", "median (quartiles)", "beside"], rows)
    return lines.replace(f"| {NOT_MEASURED} |  |", f"| {NOT_MEASURED} | |")


def headlines() -> list[tuple[Number, str]]:
    """Return the rows of the short table, with their words there."""
    return [(number, HEADLINES[number.what]) for number in NUMBERS if number.what in HEADLINES]


def _short_cells(number: Number, results: Results) -> list[str]:
    if number.run not in results:
        return [NOT_MEASURED, ""]
    return number.cells(results[number.run], SHORT_BESIDE.get(number.what))


def row_of(result: Result, rows: str, **wanted: Any) -> Row:
    """Return the one row that has these values."""
    (row,) = (row for row in result[rows] if all(row.get(key) == value for key, value in wanted.items()))
    return dict(row)


def row(rows: str, **wanted: Any) -> Find:
    """Return what finds a row by its values."""
    return lambda result: row_of(result, rows, **wanted)


def whole(result: Result) -> Row:
    """Return the result itself, as a row."""
    return result


def span(rows: str, is_wanted: Callable[[Row], bool]) -> Find:
    """Return what finds several rows: each value is a list of theirs."""

    def find(result: Result) -> Row:
        found = [row for row in result[rows] if is_wanted(row)]
        return {key: [row[key] for row in found] for key in found[0]}

    return find


def moved(operation: str, is_8bit: bool | None = None) -> Find:
    """Return what finds rows of bench_reshape_gather over large inputs. operation: the end of its name."""

    def is_wanted(row: Row) -> bool:
        fits = row["operation"].endswith(operation) and row["tokens"] >= 8192
        return fits and is_8bit in (None, "bfloat16" not in row["case"])

    return span("results", is_wanted)


def products(dtype: str, num_rows: int) -> Find:
    """Return what finds all shapes of bench_linear."""
    return span("rows", lambda row: row["dtype"] == dtype and row["rows"] == num_rows)


def by(rows: str, name: str, **wanted: Any) -> Find:
    """Return what finds the rows that have these values, by another value of theirs."""

    def find(result: Result) -> Row:
        fitting = (row for row in result[rows] if all(row.get(key) == value for key, value in wanted.items()))
        return {str(row[name]): row for row in fitting}

    return find


def step(**wanted: Any) -> Find:
    """Return what finds a step of 1,024 logits and without waiting requests, if nothing else is said."""
    return row("rows", operation="decode", **{"vocab": 1024, "waiting": 0, **wanted})


MAX_ROUNDING = 0.25
"""Of logits around 4 in bf16, for results that do not say it."""


def served(workload: str) -> Find:
    """Return what finds a workload of bench_serving, with vLLM's error if rounding does not explain it."""

    def find(result: Result) -> Row:
        found = row_of(result, "results", workload=workload)
        gap = found.get("max_gap", {}).get("vllm", 0.0)
        is_wrong = gap > found.get("max_rounding", MAX_ROUNDING)
        return found | {"error": f", and whose tokens lie up to {gap:.2f} below the best logit" if is_wrong else ""}

    return find


def family(name: str) -> Find:
    """Return what finds a family of bench_hybrid_serving, with the word of those whose tokens are wrong."""

    def find(result: Result) -> Row:
        found = row_of(result, "families", family=name)
        wrong = {peer: ", wrong tokens" if peer in found["wrong"] else "" for peer in SERVING_COLUMNS}
        return found | {"wrong": wrong}

    return find


def first_token(result: Result) -> Row:
    """Return the row of blending at 15 %, the full recompute's, the prefix cache's, and the least of the arithmetic."""
    blend = row_of(result, "speed", method="blend", ratio=0.15)
    full, prefix = (row_of(result, "speed", method=method) for method in ("full", "prefix"))
    return blend | {"full": full, "prefix": prefix, "least": full["seconds"].median / blend["ceiling"]}


LOSSES = {
    "behind itself": ("behind itself", 0.15, (0,)),
    "plain": ("v", 0.0, (1,)),
    "check layer": ("v at seams", 0.15, (1,)),
    "seamless": ("v", 0.15, (1,)),
    "random": ("random", 0.15, (1,)),
    "oracle": ("oracle deviation", 0.15, (1,)),
}


def answered(result: Result, method: str, ratio: float, check: tuple[int, ...]) -> Row:
    return row_of(result, "quality", method=method, ratios=[ratio], check=list(check))


def interval(estimate: Sequence[float]) -> Figure:
    """Return a mean and the ends of its interval as a figure."""
    mean, low, high = estimate
    return Figure(mean, low, high, 1)


def lost(result: Result) -> Row:
    """Return the answers lost by each method of LOSSES, of all."""
    return {name: interval(answered(result, *how)["lost"]) for name, how in LOSSES.items()}


SERVING_COLUMNS = {
    "kvpage": "kvpage",
    "generate": "`generate`, one by one",
    "generate_padded": "`generate`, a padded batch",
    "forward": "the model's own forward",
}
SHARED = "write and gather 32,768 tokens of Llama-3-8B's shape, bf16, one thread: NHD, HND, `paged`"
LOST = "answers lost to blending at 15 %, of 100, a Llama of 6 layers, one training, 80 documents (95 % interval)"
BLEND_SHAPE = "15 % of the reused ones computed again, Llama of 16 layers, fp32, one thread"
FOUND = "`model.generate` over `KVPageCache`, 1,024 of 1,056 prompt tokens found, 32 generated; CPU time of one thread"
HEADLINES = {
    "prefix tree: match a prompt of 8,192 tokens, 6,144 cached": "find the 6,144 cached tokens of a prompt of 8,192",
    "swap 4,096 scattered blocks of 8 layers, host to host": "swap 4,096 scattered blocks of 8 layers, host to host",
    SHARED: "write and gather 32,768 tokens, bf16, one thread",
    "store: blocks into the memory tier, 256 MiB, digests made, one thread": "store 256 MiB of blocks in memory,"
    " checksums made, one thread",
    "a decode step of 256 sequences, greedy, the model left out; CPU time of one thread": "the engine's own time in a"
    " decode step of 256 sequences, greedy",
    "serve 32 requests without a shared prefix, Llama of 8 layers, fp32, two threads": "serve 32 requests that share"
    " nothing, small Llama, fp32, two threads",
    "serve 32 requests with a shared prefix of 1,024 tokens": "serve 32 requests that share a prefix of 1,024 tokens",
    FOUND: "`model.generate` over `KVPageCache`: 1,024 of 1,056 tokens found, 32 generated",
    f"first token of 2,080 tokens, {BLEND_SHAPE}": "first token of a blended prompt of 2,080 tokens, 15 % computed"
    " again",
    LOST: "answers lost to blending at 15 %, of 100, a small trained Llama (95 % interval)",
}
"""The words of a row in the short table, by its words in the full one."""
SHORT_BESIDE = {LOST: "0: full recompute; {plain*100:.1f}: plain reuse; {random*100:.1f}: random tokens"}
"""Templates with fewer bounds and peers."""


def numbers_of(run: str, measured: str, beside: str, cases: Iterable[tuple[str, Find]]) -> list[Number]:
    """Return rows of one run that have the same templates. cases: their words, and what finds their values."""
    return [Number(run, what, find, measured, beside) for what, find in cases]


POOLED = "{array_ns:,.0f} ns: slices of a numpy array; {list_ns:,.0f} ns: a Python list"
HITS = (
    "{True[borders_hits]} of {True[requests]}: states at block borders, as vLLM keeps them; "
    "{False[hits]} of {False[requests]}: without the authors' marks"
)
TENTH = "{bound*100:.1f} %: no policy finds more; {borders_all_tenth*100:.1f} %: states at all block borders"
DISK = [("into the disk tier{}", "disk store"), ("and back", "disk retrieve")]
TENSORS = [
    ("K and V in tensors into the memory tier, {}", "tensors store"),
    ("and back, in the store's memory, {}", "tensors retrieve"),
    ("and back, into the caller's tensors, {}", "tensors out"),
    ("the first into a tier that was just opened, {}", "tensors first store"),
]


def stored(run: str, words: str, operations: Iterable[tuple[str, str]]) -> list[Number]:
    """Return rows of bench_store. operations: their words, with words in the place of {}, and names of operations."""
    find, gathered = by("results", "operation"), "; {disk gathered[bound GB/s]:,.1f}: {disk gathered[bound]}"
    return [
        Number(
            run, what.format(words), find, f"{{{name}[GB/s]:,.1f}} GB/s",
            f"{{{name}[bound GB/s]:,.1f}}: {{{name}[bound]}}" + (gathered if name == "disk store" else ""),
        )
        for what, name in operations
    ]  # fmt: skip


STEP = "{argmax us:,.0f} us: argmax alone; {vllm us:,.0f} us: vLLM's scheduler and KV manager alone"
SAMPLERS = (
    "{torch:,.2f} ms: by torch's operations; {vllm:,.2f} ms: vLLM's sampler; {bound:,.2f} ms: reading the logits once"
)
PRODUCTS = "{of bound:.2f} of the bound; {of torch:.2f} times as fast as `F.linear`"
SERVERS = "; ".join([
    "{tokens_per_s[vllm]:,.0f}: vLLM's CPU build, of which kvpage has {kvpage_over[vllm]:,.2f}{error}",
    "{tokens_per_s[kvpage_preloaded]:,.0f}: kvpage with an allocator preloaded",
    "{tokens_per_s[generate_copies]:,.0f}: a `generate` for each over the prefix's cache",
    "{tokens_per_s[generate_prefix]:,.0f}: one `generate` over the prefix's cache",
    "{tokens_per_s[generate_kept]:,.0f}: `generate` over a cache kept between the turns",
    "{tokens_per_s[generate]:,.0f}: `model.generate`",
    "{tokens_per_s[generate_batch]:,.0f}: `generate_batch`",
    "{tokens_per_s[bound]:,.0f}: the model's matrix products alone",
])  # fmt: skip
FAMILY = "; ".join([
    *(
        f"{{tokens_per_s[{name}]:,.0f}}{{wrong[{name}]}}: {words}"
        for name, words in SERVING_COLUMNS.items() if name != "kvpage"
    ),
    "kvpage has {kvpage_over[pieces]:,.2f} times that without packed mixers",
])  # fmt: skip
OVER_HTTP = "; ".join([
    "{tokens_per_second[engine]:,.0f}: `Engine` in the same process",
    "{tokens_per_second[live]:,.0f}: `AsyncEngine`",
    "{tokens_per_second[vllm]:,.0f}: vLLM's CPU server over HTTP",
    "HTTP lacks {loss[kvpage].median*100:.1f} % ({loss[kvpage].low*100:.1f}-{loss[kvpage].high*100:.1f})"
    " of `Engine`'s",
])  # fmt: skip
ROLLED_OUT = "; ".join([
    "{tokens_per_s[generate]:,.0f}: one `generate` over the padded batch, as TRL calls it",
    "{tokens_per_s[generate_batch]:,.0f}: `generate_batch`",
    "{tokens_per_s[bound]:,.0f}: the model's matrix products alone",
    "kvpage has {kvpage_over[generate]:,.1f} times that of `generate`",
])  # fmt: skip
GENERATED = [("prefix found", "{prefix for nothing ms:,.0f} ms: if the prefix cost nothing; "), ("nothing found", "")]
TOKENS_PER_S = "{tokens_per_s[kvpage]:,.0f} tokens/s"
THREADS = {"one_thread": "one thread", "two_threads": "two threads"}

NUMBERS: list[Number] = [
    Number(
        "pool", "pool: allocate and release 100 blocks, each", row("rows", batch=100), "{pool_ns/100:,.1f} ns",
        "{array_ns/100:,.1f} ns: slices of a numpy array; {list_ns/100:,.1f} ns: a Python list",
    ),
    *numbers_of("pool", "{pool_ns:,.0f} ns", POOLED, [
        ("pool: `allocate(1)` and release", row("rows", batch=1)),
        ("pool: `allocate_one` and release", row("rows", batch="one")),
    ]),
    *(
        Number("prefix", what, whole, f"{{{name}:,.2f}} us", beside)
        for what, name, beside in (
            ("prefix tree: match a prompt of 8,192 tokens, 6,144 cached", "match_us",
             "{match_memcmp_us:,.2f} us: memcmp, all in cache"),
            ("the same prompts wholly cached, cold in the CPU's cache", "cold_match_us",
             "{cold_memcmp_us:,.2f} us: memcmp, piece by piece; {cold_flat_us:,.2f} us: one memcmp over all"),
            ("insert its last 2,048 tokens", "insert_after_us", ""),
            ("match one prompt of 131,072 tokens", "long_match_us", "{long_memcmp_us:,.2f} us: memcmp"),
            ("append a block to a conversation of up to 32,768 tokens", "append_us", ""),
            ("evict a block among 50,000 leaves", "evict_50k_us", "{evict_1k_us:,.2f} us: among 1,000"),
        )
    ),
    Number(
        "prefix", "match 8,192 tokens from two threads, from four", by("threads", "threads", case="match of 8,192"),
        "{2[ratio]:,.2f} of one thread", "{4[ratio]:,.2f} of one thread",
    ),
    *numbers_of("block_manager", "{us:,.2f} us", "{bound us:,.2f} us: a copy of the arrays", [
        ("a decode step of 256 sequences in the block manager: append, slots, tables, commit; of each sequence",
         row("rows", what="step by rows")),
        ("the same by calls that name the sequences", row("rows", what="step by names")),
    ]),
    Number(
        "block_manager", "allocate a prompt of 8,192 tokens, 6,144 cached, an array",
        row("rows", what="allocate, array"), "{us:,.2f} us", "{bound us:,.2f} us: memcmp",
    ),
    Number(
        "block_manager", "the same, a list", row("rows", what="allocate, list"), "{us:,.2f} us",
        "{bound us:,.2f} us: numpy's conversion of the list",
    ),
    *numbers_of("hybrid_prefix", "{True[hits]} of {True[requests]}", HITS, [
        ("hybrid models: prompts that find their system prompt of 1,600 tokens", by("rows", "marked", trace="aligned")),
        ("hybrid models: the same, shifted by 100 tokens against blocks of 528", by("rows", "marked", trace="shifted")),
    ]),
    *numbers_of("hybrid_prefix", "{tenth*100:.1f} %", TENTH, [
        (f"hybrid models: {trace}, a tenth of the checkpoints: tokens found, of an oracle's that keeps all",
         row("rows", trace=trace, marked=True))
        for trace in ("shifted", "short", "chats", "agents")
    ]),
    Number(
        "slots", "whole-sequence slots: alloc and free", row("rows", what="alloc and free"), "{us:,.2f} us",
        "{bound_us:,.2f} us: a Python list",
    ),
    Number(
        "slots", "find a prompt of 8,192 tokens among 100, 6,144 shared", row("rows", what="find, int32"),
        "{us:,.2f} us", "{bound_us:,.2f} us: memcmp; {python_us:,.0f} us: a trie of dicts",
    ),
    Number(
        "token_trie", "token trie: add 8,192 tokens", row("rows", what="DynamicTokenTrie, no K and V"),
        "{ms:,.1f} ms", "{bound_ms:,.1f} ms: bare nodes; {quadratic_ms:,.0f} ms: stamping all ancestors",
    ),
    Number(
        "token_trie", "the same with K and V", row("rows", what="DynamicTokenTrie, K and V"), "{ms:,.1f} ms",
        "{bound_ms:,.1f} ms: bare nodes and clones",
    ),
    Number(
        "events", "hash and pack the events of a block, cached and evicted, 512 at once", row("rows", batch=512),
        "{packed:,.2f} us", "{sha256:,.2f} us: SHA-256 alone",
    ),
    Number(
        "swap_host", "swap 4,096 scattered blocks of 8 layers, host to host", lambda r: r["results"]["separate"],
        "{scattered[gb_per_s]:,.1f} GB/s", "{copy_[gb_per_s]:,.1f} GB/s: one `copy_`",
    ),
    *(
        Number(run, what, find, "{GB/s:.0f} GB/s", "{of copy:.2f} of one `copy_`")
        for run, what, find in (
            ("reshape_gather_one_thread", SHARED, moved("_cache", is_8bit=False)),
            ("reshape_gather_one_thread", "the same in fp8 and int8", moved("_cache", is_8bit=True)),
            ("reshape_gather_one_thread", "chunks of 8,192 tokens, all layers in one call",
             moved("_chunk device")),
            ("reshape_gather", "two threads, 32,768 tokens, bf16", moved("_cache", is_8bit=False)),
            ("reshape_gather", "two threads, fp8 and int8", moved("_cache", is_8bit=True)),
        )
    ),
    *stored("store", ", in the page cache", [
        ("store: blocks into the memory tier, 256 MiB, digests made, one thread", "memory store"),
        ("and back, digests checked", "memory retrieve"),
        *DISK,
        ("into Redis", "redis store"),
        ("and back", "redis retrieve"),
    ]),
    Number(
        "store", "look up a prompt of 16,384 tokens", row("results", operation="lookup 16k"), "{us:,.0f} us",
        "{bound us:,.0f} us: SHA-256",
    ),
    *stored("store_two_threads", ", two threads", DISK),
    *stored("store_tensors", "one thread", TENSORS),
    *stored("store_tensors_two_threads", "two threads", TENSORS),
    *numbers_of(
        "bytes", "{GB/s:,.1f} GB/s",
        "{of blocks:,.2f} of the same blocks through a `KVStore`; {bound GB/s:,.1f}: {bound}", [
            (f"records of {num_tokens} tokens as pages of an engine, {what}",
             row("results", operation=operation, tokens=num_tokens))
            for num_tokens in (16, 256)
            for what, operation in (
                ("into the memory tier", "memory store"),
                ("and back", "memory load"),
                ("into the disk tier, in the page cache", "disk store"),
                ("and back from disk", "disk load"),
            )
        ],
    ),
    *numbers_of("engine_overhead", "{kvpage us:,.0f} us", STEP, [
        ("a decode step of 256 sequences, greedy, the model left out; CPU time of one thread",
         step(seqs=256, mode="greedy")),
        ("the same of 64", step(seqs=64, mode="greedy")),
        ("of 256, while 1,000 requests wait", step(seqs=256, mode="greedy", waiting=1000)),
        ("of 256, sampled: temperature, top-k 50, top-p 0.9", step(seqs=256, mode="sampled")),
        ("of 256, sampled with penalties", step(seqs=256, mode="penalties")),
        ("of 256, greedy, 32,000 tokens in the vocabulary instead of 1,024",
         step(seqs=256, mode="greedy", vocab=32000)),
    ]),
    *numbers_of("engine_overhead", "{kvpage us:,.0f} us", "{vllm us:,.0f} us: vLLM's", [
        ("admit a prompt of 8,192 tokens, 6,144 cached, an array", row("rows", operation="admit", given="array")),
        ("the same, a list", row("rows", operation="admit", given="list")),
    ]),
    *numbers_of("sampling", "{sample:,.2f} ms", SAMPLERS, [
        (f"choose a token for each of 256 rows of {vocab:,} logits, {rules}",
         row("rows", num_rows=256, vocab_size=vocab, rules=rules))
        for vocab in (1024, 151_936)
        for rules in ("greedy", "top-k 50", "top-p 0.9", "top-p 0.9, penalties")
    ]),
    Number(
        "layer_overhead", "a layer of a decode step of 16 sequences, besides its native calls, Llama-3-8B, bf16",
        row("rows", model="llama 3 8B", dtype="bfloat16", seqs=16), "{besides us:,.1f} us",
        "{native us:,.1f} us: the native calls",
    ),
    *numbers_of("linear", "{kvpage GF/s:.0f} GF/s", PRODUCTS, [
        ("products with weights of small models, fp32, one row", products("float32", 1)),
        ("the same of 32 rows", products("float32", 32)),
        ("the same of 256 rows", products("float32", 256)),
        ("the same in bf16, 32 rows", products("bfloat16", 32)),
    ]),
    *numbers_of("linear_two_threads", "{kvpage GF/s:.0f} GF/s", PRODUCTS, [
        ("fp32 with two threads, one row", products("float32", 1)),
        ("the same of 256 rows", products("float32", 256)),
    ]),
    Number(
        "attention_steps",
        "attention of a layer in a decode step of 16 sequences of 1,088 tokens, Llama-3-8B, bf16, two threads",
        row("results", step="decode", shape="llama 3 8B", dtype="bfloat16", threads=2), "{us:,.0f} us",
        "{of bound:,.2f} of the products' or reading's rate",
    ),
    *(
        Number(run, what, served(workload), TOKENS_PER_S, SERVERS)
        for run, workload, what in (
            ("serving", "separate", "serve 32 requests without a shared prefix, Llama of 8 layers, fp32, two threads"),
            ("serving", "shared", "serve 32 requests with a shared prefix of 1,024 tokens"),
            ("serving_bf16", "separate", "without a shared prefix, 8 requests, bf16"),
            ("serving_bf16", "shared", "with one, 8 requests, bf16"),
            *(
                ("serving_large", workload,
                 f"{what}, 16 requests, Llama of 16 layers of 1,024, 197 million parameters, fp32")
                for workload, what in (("separate", "without a shared prefix"), ("shared", "with one"))
            ),
            ("serving_large_bf16", "separate", "without a shared prefix, 4 requests, the same Llama, bf16"),
            ("serving_large_bf16", "shared", "with one, 4 requests, the same Llama, bf16"),
            ("multi_turn", "multi-turn",
             "16 conversations of 4 turns of 384 new tokens, 32 generated in each, Llama of 8 layers, fp32"),
        )
    ),
    *(
        Number(run, f"8 requests at once, `{name}` of 4 layers of 512, fp32", family(name), TOKENS_PER_S, FAMILY)
        for run, families in SERVED.items()
        for name in families
    ),
    Number(
        "serve", "64 streams at once by a server, 32 tokens after 32 each, Llama of 8 layers, fp32", whole,
        "{tokens_per_second[kvpage]:,.0f} tokens/s", OVER_HTTP,
    ),
    *(
        Number(
            "prefill_decode", f"prefill and decode by workers apart, over Redis: {what}",
            by("results", "contender", workers="busy"), f"{{apart[{column}]:,.0f}} ms",
            f"{{one worker[{column}]:,.0f}} ms: one worker with one thread; "
            f"{{one worker, 2 threads[{column}]:,.0f}} ms: with both threads",
        )
        for what, column in (
            ("first token of a prompt of 1,024 tokens while 4 others decode", "first ms"),
            ("the longest gap of the others", "gap ms"),
        )
    ),
    Number(
        "rollouts", "GRPO's rollouts: 4 groups of 8 completions of 64 tokens, prompts of 512", whole, TOKENS_PER_S,
        ROLLED_OUT,
    ),
    *(
        Number("generate_cache", what if name == "prefix found" else "the same, nothing found",
               row("results", prefix=num_prefix, batch=1), f"{{{name} ms:,.0f}} ms",
               beside + "{generate ms:,.0f} ms: without kvpage")
        for num_prefix, what in ((1024, FOUND), (128, "128 of 160 prompt tokens found"))
        for name, beside in GENERATED
    ),
    *(
        Number(f"blend_ops_{run}", f"{what}, {threads}", row("results", operation=operation), "{ms:,.1f} ms",
               "{copies:,.2f} of a `copy_` of all K and V")
        for run, threads in THREADS.items()
        for what, operation in (
            ("blend 32 layers of 4,096 retrieved tokens, Llama-3-8B, bf16", "blend"),
            ("the same in the memory of what was retrieved, K turned there", "in place"),
            ("the same of segments that stay at their positions", "unturned"),
        )
    ),
    *(
        Number(run, what, find, measured, beside)
        for first in ["{full[seconds]:,.2f} s: full recompute; {prefix[seconds]:,.2f} s: the first segment cached; "
                      "{least:.2f} s: the least that its arithmetic takes"]
        for run, what, find, measured, beside in (
            ("blend_speed_2048", f"first token of 2,080 tokens, {BLEND_SHAPE}", first_token, "{seconds:,.2f} s", first),
            ("blend_speed_2048", "to warm a segment of 512 tokens, once", lambda result: result["warming"],
             "{measured:,.2f} s", "{alone:,.2f} s: without its sensitivity"),
            ("blend_speed_4096", "first token of 4,128 tokens", first_token, "{seconds:,.2f} s", first),
        )
    ),
    Number(
        "blend_quality", LOST, lost, "{behind itself*100:.1f}",
        "0: full recompute; {plain*100:.1f}: plain reuse; {check layer*100:.1f}: chosen by a check layer; "
        "{seamless*100:.1f}: by a check layer without `seam`; {random*100:.1f}: random tokens; "
        "{oracle*100:.1f}: an oracle",
    ),
]  # fmt: skip
