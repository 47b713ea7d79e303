"""The tables of numbers, made of the results of benchmarks/runs.py. No number is written by hand.

docs/benchmarks.md has all rows, README.md those with a headline. Each number is a median, with the quartiles after it.
"""

from collections.abc import Callable
from typing import NamedTuple

from kvpage.benchmarks.engine_cells import admission, attention_step, layer, products, step, step_beside
from kvpage.benchmarks.hybrid_cells import HYBRID_ROWS, requests_served
from kvpage.benchmarks.number_cells import (
    CHUNKS,
    LOSSES,
    ROWS,
    Result,
    first_token,
    first_token_beside,
    generated,
    generated_beside,
    is_8bit,
    is_plain,
    losses,
    lost,
    manager,
    mixed,
    paged,
    peers,
    pool_beside,
    pool_cell,
    row_of,
    sampled,
    served,
    shares,
    slots_beside,
    speeds,
    store_bound,
    stored,
    text,
    threads,
    tree,
    tree_beside,
    trie,
    us,
)
from kvpage.benchmarks.runs import RUNS, SERVED
from kvpage.benchmarks.server_cells import handed_over, over_http, rolled_out

Results = dict[str, Result]
NOT_MEASURED = "not measured yet"


class Number(NamedTuple):
    """One row.

    Args:
        what: its words in the full table.
        measured: the cell with the number, from the run's result.
        beside: the cell with bounds and peers.
        run: the name of the run that gave it.
        headline: its words in the short table; None for a row of the full table alone.
        headline_beside: the cell with fewer bounds and peers in the short table; None for the same cell.
    """

    what: str
    measured: Callable[[Result], str]
    beside: Callable[[Result], str]
    run: str
    headline: str | None = None
    headline_beside: Callable[[Result], str] | None = None


def measured_numbers(results: Results) -> list["Number"]:
    """Return the rows whose run has a result."""
    return [number for number in NUMBERS if number.run in results]


def full_table(results: Results) -> str:
    """Return all rows, with the commands that gave them.

    Args:
        results: the line of JSON of each run, by name.
    """
    lines = ["| measured | median (quartiles) | beside | command |", "|---|---|---|---|"]
    last = ""
    for number in measured_numbers(results):
        result = results[number.run]
        command = "" if number.run == last else f"`python {' '.join(RUNS[number.run].arguments)}`"
        lines.append(f"| {number.what} | {number.measured(result)} | {number.beside(result)} | {command} |")
        last = number.run
    return "\n".join(lines)


def short_table(results: Results) -> str:
    """Return the rows with a headline, also those whose run has no result.

    Args:
        results: the line of JSON of each run, by name.
    """
    lines = ["| measured | median (quartiles) | beside |", "|---|---|---|"]
    lines += [_short_row(number, results) for number in NUMBERS if number.headline is not None]
    return "\n".join(lines)


def _short_row(number: Number, results: Results) -> str:
    if number.run not in results:
        return f"| {number.headline} | {NOT_MEASURED} | |"
    result, beside = results[number.run], number.headline_beside or number.beside
    return f"| {number.headline} | {number.measured(result)} | {beside(result)} |"


NUMBERS: list[Number] = [
    Number(
        "pool: allocate and release 100 blocks, each",
        pool_cell(100),
        pool_beside(100),
        "pool",
    ),
    Number("pool: `allocate(1)` and release", pool_cell(1), pool_beside(1), "pool"),
    Number("pool: `allocate_one` and release", pool_cell("one"), pool_beside("one"), "pool"),
    Number(
        "prefix tree: match a prompt of 8,192 tokens, 6,144 cached",
        tree("match_us"),
        tree_beside(match_memcmp_us="memcmp, all in cache"),
        "prefix",
        headline="find the 6,144 cached tokens of a prompt of 8,192",
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
        "a decode step of 256 sequences in the block manager: append, slots, tables, commit; of each sequence",
        *manager("step by rows"),
        "block_manager",
    ),
    Number("the same by calls that name the sequences", *manager("step by names"), "block_manager"),
    Number("allocate a prompt of 8,192 tokens, 6,144 cached, an array", *manager("allocate, array"), "block_manager"),
    Number("the same, a list", *manager("allocate, list"), "block_manager"),
    *(Number(f"hybrid models: {what}", *cells, "hybrid_prefix") for what, cells in HYBRID_ROWS),
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
        headline="swap 4,096 scattered blocks of 8 layers, host to host",
    ),
    Number(
        "write and gather 32,768 tokens of Llama-3-8B's shape, bf16, one thread: NHD, HND, `paged`",
        speeds(ROWS, is_plain),
        shares(ROWS, is_plain),
        "reshape_gather_one_thread",
        headline="write and gather 32,768 tokens, bf16, one thread",
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
        headline="store 256 MiB of blocks in memory, checksums made, one thread",
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
    *(
        Number(f"{what}, {threads}", stored(f"tensors {operation}"), store_bound(f"tensors {operation}"), run)
        for run, threads in (("store_tensors", "one thread"), ("store_tensors_two_threads", "two threads"))
        for what, operation in (
            ("K and V in tensors into the memory tier", "store"),
            ("and back, in the store's memory", "retrieve"),
            ("and back, into the caller's tensors", "out"),
            ("the first into a tier that was just opened", "first store"),
        )
    ),
    *(
        Number(f"records of {num_tokens} tokens as pages of an engine, {what}", *paged(operation, num_tokens), "bytes")
        for num_tokens in (16, 256)
        for what, operation in (
            ("into the memory tier", "memory store"),
            ("and back", "memory load"),
            ("into the disk tier, in the page cache", "disk store"),
            ("and back from disk", "disk load"),
        )
    ),
    Number(
        "a decode step of 256 sequences, greedy, the model left out; CPU time of one thread",
        step(seqs=256, mode="greedy"),
        step_beside(seqs=256, mode="greedy"),
        "engine_overhead",
        headline="the engine's own time in a decode step of 256 sequences, greedy",
    ),
    Number("the same of 64", step(seqs=64, mode="greedy"), step_beside(seqs=64, mode="greedy"), "engine_overhead"),
    Number(
        "of 256, while 1,000 requests wait",
        step(seqs=256, mode="greedy", waiting=1000),
        step_beside(seqs=256, mode="greedy", waiting=1000),
        "engine_overhead",
    ),
    Number(
        "of 256, sampled: temperature, top-k 50, top-p 0.9",
        step(seqs=256, mode="sampled"),
        step_beside(seqs=256, mode="sampled"),
        "engine_overhead",
    ),
    Number(
        "of 256, sampled with penalties",
        step(seqs=256, mode="penalties"),
        step_beside(seqs=256, mode="penalties"),
        "engine_overhead",
    ),
    Number(
        "of 256, greedy, 32,000 tokens in the vocabulary instead of 1,024",
        step(seqs=256, mode="greedy", vocab=32000),
        step_beside(seqs=256, mode="greedy", vocab=32000),
        "engine_overhead",
    ),
    Number("admit a prompt of 8,192 tokens, 6,144 cached, an array", *admission("array"), "engine_overhead"),
    Number("the same, a list", *admission("list"), "engine_overhead"),
    *(
        Number(f"choose a token for each of 256 rows of {vocab:,} logits, {rules}", *sampled(vocab, rules), "sampling")
        for vocab in (1024, 151_936)
        for rules in ("greedy", "top-k 50", "top-p 0.9", "top-p 0.9, penalties")
    ),
    Number(
        "a layer of a decode step of 16 sequences, besides its native calls, Llama-3-8B, bf16",
        *layer("llama 3 8B", "bfloat16", 16),
        "layer_overhead",
    ),
    Number("products with weights of small models, fp32, one row", *products("float32", 1), "linear"),
    Number("the same of 32 rows", *products("float32", 32), "linear"),
    Number("the same of 256 rows", *products("float32", 256), "linear"),
    Number("the same in bf16, 32 rows", *products("bfloat16", 32), "linear"),
    Number("fp32 with two threads, one row", *products("float32", 1), "linear_two_threads"),
    Number("the same of 256 rows", *products("float32", 256), "linear_two_threads"),
    Number(
        "attention of a layer in a decode step of 16 sequences of 1,088 tokens, Llama-3-8B, bf16, two threads",
        *attention_step("decode", "llama 3 8B", "bfloat16", 2),
        "attention_steps",
    ),
    Number(
        "serve 32 requests without a shared prefix, Llama of 8 layers, fp32, two threads",
        served("separate", "kvpage"),
        peers("separate"),
        "serving",
        headline="serve 32 requests that share nothing, small Llama, fp32, two threads",
    ),
    Number(
        "serve 32 requests with a shared prefix of 1,024 tokens",
        served("shared", "kvpage"),
        peers("shared"),
        "serving",
        headline="serve 32 requests that share a prefix of 1,024 tokens",
    ),
    *(
        Number(f"{what}, {kind}", served(workload, "kvpage"), peers(workload), run)
        for run, kind in (
            ("serving_bf16", "8 requests, bf16"),
            ("serving_large", "16 requests, Llama of 16 layers of 1,024, 197 million parameters, fp32"),
            ("serving_large_bf16", "4 requests, the same Llama, bf16"),
        )
        for what, workload in (("without a shared prefix", "separate"), ("with one", "shared"))
    ),
    Number(
        "16 conversations of 4 turns of 384 new tokens, 32 generated in each, Llama of 8 layers, fp32",
        served("multi-turn", "kvpage"),
        peers("multi-turn"),
        "multi_turn",
    ),
    *(
        Number(f"8 requests at once, `{family}` of 4 layers of 512, fp32", *requests_served(family), run)
        for run, families in SERVED.items()
        for family in families
    ),
    Number("64 streams at once by a server, 32 tokens after 32 each, Llama of 8 layers, fp32", *over_http(), "serve"),
    *(
        Number(f"prefill and decode by workers apart, over Redis: {what}", *handed_over(column), "prefill_decode")
        for what, column in (
            ("first token of a prompt of 1,024 tokens while 4 others decode", "first ms"),
            ("the longest gap of the others", "gap ms"),
        )
    ),
    Number("GRPO's rollouts: 4 groups of 8 completions of 64 tokens, prompts of 512", *rolled_out(), "rollouts"),
    Number(
        "`model.generate` over `KVPageCache`, 1,024 of 1,056 prompt tokens found, 32 generated; CPU time of one thread",
        generated(1024, "prefix found"),
        generated_beside(1024, "prefix for nothing", "generate"),
        "generate_cache",
        headline="`model.generate` over `KVPageCache`: 1,024 of 1,056 tokens found, 32 generated",
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
    *(
        Number(f"{what}, {threads}", *mixed(operation), run)
        for run, threads in (("blend_ops_one_thread", "one thread"), ("blend_ops_two_threads", "two threads"))
        for what, operation in (
            ("blend 32 layers of 4,096 retrieved tokens, Llama-3-8B, bf16", "blend"),
            ("the same in the memory of what was retrieved, K turned there", "in place"),
            ("the same of segments that stay at their positions", "unturned"),
        )
    ),
    Number(
        "first token of 2,080 tokens, 15 % of the reused ones computed again, Llama of 16 layers, fp32, one thread",
        first_token("blend", 0.15),
        first_token_beside,
        "blend_speed_2048",
        headline="first token of a blended prompt of 2,080 tokens, 15 % computed again",
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
        losses(*LOSSES),
        "blend_quality",
        headline="answers lost to blending at 15 %, of 100, a small trained Llama (95 % interval)",
        headline_beside=losses("plain reuse", "random tokens"),
    ),
]
