"""How near does attention over blocks on a GPU come to reading its keys and values once, or to the products it must do?

Decoding reads every key and value once: its bound is their bytes over the bandwidth of a large device copy (read and
written), measured in the same run. A whole prompt's bound are its products, 2 * (key size + value size) for each pair
of query head and visible key, over the rate of a large square bf16 product, likewise. Targets on an H200 from 256 MiB
on, of the bound: decoding 0.85 in bf16, 0.7 in 8-bit floats, 0.5 of latents by 16 heads, 0.7 by more.

Beside them torch's scaled_dot_product_attention on K and V that lie contiguous, without the gathering that it would
need. At 1 and 64 sequences of 8,192 keys and a prompt of 8,192 also the libraries that are installed, vLLM's operation
and cuDNN (attention_peers.py). Results are checked before anything is timed. Times are medians by the device's clock,
with a cold L2 cache; the launch is hidden behind the flushing, and given apart (`launch us`: one call on the host,
without waiting).
"""

import argparse
import functools
import statistics
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from kvpage.benchmarks.attention_peers import peers_of, target_of
from kvpage.benchmarks.cells import Row, shown
from kvpage.benchmarks.figure import seconds, within
from kvpage.benchmarks.paged_case import BF16, E4M3, INT8, MOST_CACHE_BYTES, Case, Model
from kvpage.benchmarks.pictures import curves
from kvpage.benchmarks.script import finish, machine, need_device, option, parse

COLUMNS = (
    "{kind:<8} {model:<23} {dtype:<13} {seqs:>4} {keys:>6} {us:>9.1f} {GB/s:>6.0f} {TFLOP/s:>7.1f} {of bound:>8.2f} "
    "{x sdpa:>6.2f} {launch us:>9.1f} {is_met:>6}"
)
PEER_COLUMNS = "{kind:<8} {model:<23} {dtype:<13} {seqs:>4} {queries:>7} {peer:<13} {us:>9.1f} {times:>6.2f}"


class Sizes(NamedTuple):
    """What is measured. The first batch and context are those of the targets, and of the peers.

    decoding: (sequences, keys of each). prompts: their tokens. added: new tokens after the first context.
    flushed: bytes that are written between two calls. product: of square matrices.
    """

    decoding: tuple[tuple[int, int], ...]
    prompts: tuple[int, ...]
    added: int
    copied: int
    flushed: int
    product: int

    @property
    def settled(self) -> tuple[int, int]:
        return self.decoding[0]


BATCHES, CONTEXTS = (1, 8, 64, 256), (1024, 8192, 32768, 131072)
GRID = tuple((batch, context) for context in CONTEXTS for batch in BATCHES)
SIZES = {
    "whole": Sizes(
        tuple(dict.fromkeys([(64, 8192), (1, 8192), (64, 512), *GRID])), (8192, 512, 2048), 256, 2**31, 2**30, 8192
    ),
    "tiny": Sizes(((2, 40), (1, 40)), (40, 17), 5, 2**20, 2**10, 64),
}


MODELS = {
    "llama 3 8B": Model("flash", 8, 32, 128, 128, 16),
    "deepseek mla": Model("mla", 1, 128, 576, 512, 64),
    "deepseek mla, 16 heads": Model("mla", 1, 16, 576, 512, 64),  # a part in eight of a tensor-parallel server
}


def milliseconds(call: Callable[[], object], flush: torch.Tensor, rounds: int) -> float:
    """The median of `rounds` calls after a warm one, by the device's clock."""
    call()
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(rounds)]
    for start, end in events:
        flush.zero_()
        start.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in events)


def launch_seconds(call: Callable[[], object]) -> float:
    """Return the time of one call on the host, without waiting for the device."""
    times = []
    for _ in range(20):
        torch.cuda.synchronize()
        times.append(seconds(call))
    return statistics.median(times)


def bounds(sizes: Sizes, flush: torch.Tensor) -> dict[str, float]:
    """Bytes a second of a copy, both ways counted; operations a second of a bf16 product."""
    source, target = torch.ones(2, sizes.copied, dtype=torch.uint8, device="cuda")
    copy = milliseconds(lambda: target.copy_(source), flush, 7)
    left, right = torch.randn(2, sizes.product, sizes.product, device="cuda").to(BF16)
    product = milliseconds(lambda: left @ right, flush, 7)
    return {"bytes/s": 2 * source.numel() / copy * 1e3, "operations/s": 2 * sizes.product**3 / product * 1e3}


def cases(sizes: Sizes) -> Iterator[tuple[str, str, torch.dtype, int, int, int]]:
    """(kind, model, dtype, sequences, keys of each, queries of each); the ones that matter most first."""
    for batch, context in sizes.decoding:
        for name in MODELS:
            for dtype in (BF16, E4M3):
                yield "decode", name, dtype, batch, context, 1
        if (batch, context) == sizes.settled:
            yield "decode", "llama 3 8B", INT8, batch, context, 1
            yield from prefills(sizes)


def prefills(sizes: Sizes) -> Iterator[tuple[str, str, torch.dtype, int, int, int]]:
    """Whole prompts, and a few new tokens after many."""
    context = sizes.settled[1]
    for length, num_new in [(sizes.prompts[0],) * 2, (context, sizes.added), *((n, n) for n in sizes.prompts[1:])]:
        for name in ("llama 3 8B", "deepseek mla"):
            for dtype in (BF16, E4M3):
                yield "prefill", name, dtype, 1, length, num_new


def measure(kind: str, name: str, case: Case, limits: dict[str, float], flush: torch.Tensor, rounds: int) -> Row:
    case.check_paged()
    contiguous = case.contiguous()
    paged = milliseconds(case.paged, flush, rounds)
    bound = 1e3 * max(case.num_bytes / limits["bytes/s"], case.num_operations / limits["operations/s"])
    sdpa = milliseconds(contiguous, flush, rounds) if contiguous else None
    target = target_of(case, case.num_bytes)
    return {
        "kind": kind,
        "model": name,
        "dtype": str(case.layout.dtype).removeprefix("torch."),
        "seqs": case.num_seqs,
        "keys": case.length,
        "queries": case.num_queries,
        "us": paged * 1e3,
        "GB/s": case.num_bytes / paged / 1e6,
        "TFLOP/s": case.num_operations / paged / 1e9,
        "of bound": bound / paged,
        "x sdpa": sdpa and sdpa / paged,
        "launch us": launch_seconds(case.paged) * 1e6,
        "target": target,
        "is_met": None if target is None else bound / paged >= target,
    }


def each_result(options: argparse.Namespace, limits: dict[str, float], flush: torch.Tensor) -> Iterator[Row]:
    """Measure what fits, with the peers that take it."""
    sizes = SIZES[options.sizes]
    most, keys = sizes.settled
    for kind, name, dtype, num_seqs, length, num_queries in cases(sizes):
        # Libraries compute few cases: each of them takes seconds to be compiled.
        takes_peers = length == keys and num_seqs in (1, most) and num_queries in (1, keys)
        is_large = num_seqs * length * MODELS[name].token_bytes(dtype) > MOST_CACHE_BYTES
        if is_large or (options.cases == "peers" and not takes_peers):
            continue
        case = Case(MODELS[name], dtype, num_seqs, length, num_queries)
        row = measure(kind, name, case, limits, flush, options.rounds)
        peers = peers_of(case, options.without) if takes_peers else ()
        row["peers us"] = {peer: 1e3 * milliseconds(call, flush, options.rounds) for peer, call in peers}
        yield row


def main() -> None:
    options = parse(
        "paged_attention",
        __doc__,
        rounds=15,
        seconds=option(75.0, "after which no further case begins"),
        sizes=option("whole", "tiny shows that it runs", choices=SIZES),
        cases=option("all", "peers: those that libraries compute", choices=["all", "peers"]),
        without=option([], "peers to leave out", metavar="NAME"),
    )
    need_device()
    torch.manual_seed(0)
    sizes = SIZES[options.sizes]
    flush = torch.empty(sizes.flushed, dtype=torch.uint8, device="cuda")
    limits = bounds(sizes, flush)
    print(f"copy {limits['bytes/s'] / 1e9:.0f} GB/s, bf16 product {limits['operations/s'] / 1e12:.0f} TFLOP/s\n")
    results = shown(COLUMNS, within(options.seconds, each_result(options, limits, flush)))
    peers = ((row, peer, us) for row in results for peer, us in row["peers us"].items())
    shown(PEER_COLUMNS, ({**row, "peer": peer, "us": us, "times": us / row["us"]} for row, peer, us in peers))
    decoding = sorted((row for row in results if row["kind"] == "decode"), key=lambda row: row["keys"])
    labels = {"xscale": "log", "xlabel": "keys of a sequence", "ylabel": "decoding, part of the bound"}
    by = ("model", "dtype", "seqs")
    draw = functools.partial(curves, rows=decoding, x="keys", values=["of bound"], by=by, lines=[1.0], **labels)
    finish(options, draw, machine=machine("cuda"), **limits, results=results)


if __name__ == "__main__":
    main()
