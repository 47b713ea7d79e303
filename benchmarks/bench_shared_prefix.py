"""How much faster is decoding where sequences share a prefix, than where each has a copy of it?

    shared    all tables begin with the same blocks, which are read once: on a GPU by a plan of ops.shared_prefixes, on
              a CPU because neighbours of the tables' order are read together
    apart     the same keys, and each sequence has blocks of its own for them
    sdpa      torch's scaled_dot_product_attention on K and V that lie contiguous, without the gathering that it needs
    vllm      with --vllm PYTHON, an interpreter that has vLLM's CPU build: its attention on a cache of its own form,
              over tables that share blocks, in a process that sleeps while others run; "isa" is what it picks

The bound is a copy of as many bytes as the keys and values have that are read once, read and written ones counted.
"plan us" is the host's time for a plan. All results are compared before anything is timed. Contenders take turns,
which begin with some calls that do not count. On a GPU times are by its own clock, with a cold L2 cache. Target, on a
CPU with two threads: 32 sequences over 4,096 shared and 128 own tokens are decoded at least 4 times as fast as apart.
`--loop` measures the whole of an engine's steps, too (shared_prefix_loop.py); its target is 1.5 times as many tokens
per second as apart.

    kvpage bench shared_prefix [--device cuda] [--dtypes bf16 fp32] [--threads 2] [--loop] [--vllm PYTHON]
        [--plot PATH]
"""

import itertools
import math
import time
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F

from kvpage import CacheLayout, ops
from kvpage.benchmarks.cells import Row, shown
from kvpage.benchmarks.figure import Figure, in_turns, result, seconds
from kvpage.benchmarks.peer_process import PeerProcess, vllm_peer
from kvpage.benchmarks.pictures import curves
from kvpage.benchmarks.script import DEVICE, VLLM, finish, option, parse
from kvpage.benchmarks.serving_workloads import DTYPES
from kvpage.benchmarks.shared_prefix_loop import loop_rows

BLOCK_SIZE, KV_HEADS, HEADS, SIZE = 16, 8, 32, 128  # of Llama 3 8B
FLUSHED_BYTES = 2**28  # between two calls on a GPU, whose cache has less
SETTLING = 4  # calls of a turn that do not count, on a CPU
TOLERANCE = 2e-2
TARGET, TARGET_CASE, LOOP_TARGET = 4.0, (32, 4096, 128), 1.5
LOOP_COLUMNS = "{loop:<8} {dtype:>5} {ms:>24.1f} {tokens/s:>24.1f} {times:>18.2f}"
COLUMNS = (
    "{dtype:>5} {seqs:>4} {shared:>6} {own:>5} {shared us:>26.1f} {apart us:>26.1f} {times:>18.2f} {of bound:>18.2f} "
    "{x sdpa:>18.2f} {x vllm:>18.2f} {isa:>5} {plan us:>18.1f}"
)
Measure = Callable[[Callable[[], object], int], float]


class Case:
    """Sequences of `shared` equal tokens and `own` more, whose last one has a query; blocks in random order."""

    def __init__(self, num_seqs: int, shared: int, own: int, device: torch.device, dtype: torch.dtype) -> None:
        layout = self.layout = CacheLayout(BLOCK_SIZE, KV_HEADS, SIZE, dtype)
        first, rest = shared // BLOCK_SIZE, -(-(shared % BLOCK_SIZE + own) // BLOCK_SIZE)
        self.lengths = [shared + own] * num_seqs
        ids = torch.randperm(first + num_seqs * (first + rest)).to(torch.int32)
        once, copies, others = ids.split([first, num_seqs * first, num_seqs * rest])
        others = others.view(num_seqs, rest)
        self.host_tables = torch.cat([once.expand(num_seqs, first), others], 1)
        self.tables = self.host_tables.to(device)
        self.apart_tables = torch.cat([copies.view(num_seqs, first), others], 1).to(device)
        cache = layout.allocate(len(ids), 1, device)[0].normal_()
        pairs = torch.stack([once.repeat(num_seqs), copies], 1).long()
        ops.copy_blocks([cache], pairs, layout)
        self.cache = ops.BoundCache(cache, layout)
        self.device_lengths = torch.tensor(self.lengths, device=device) if device.type == "cuda" else self.lengths
        self.query = torch.randn(num_seqs, HEADS, SIZE, device=device).to(dtype)
        plan = self.plan()
        self.on_device = None if plan is None else plan.to(device)
        token_bytes = 2 * KV_HEADS * SIZE * cache.element_size()
        self.num_bytes = (shared + num_seqs * own) * token_bytes
        self.contiguous = self._contiguous(num_seqs, shared + own)

    def plan(self) -> torch.Tensor | None:
        """Return the plan that an engine makes for a step."""
        return ops.shared_prefixes(self.host_tables, self.lengths, BLOCK_SIZE)

    def attend(self, tables: torch.Tensor, plan: torch.Tensor | None) -> torch.Tensor:
        """Attend over blocks. plan: None where nothing is shared."""
        longest = max(self.lengths)
        return ops.paged_attention(
            self.query, self.cache, tables, self.device_lengths, max_seq_len=longest, shared=plan
        )

    def sdpa(self) -> torch.Tensor:
        """Attend by torch, over all sequences at once."""
        key, value = self.contiguous
        return F.scaled_dot_product_attention(self.query[:, :, None], key, value, enable_gqa=True)[:, :, 0]

    def _contiguous(self, num_seqs: int, length: int) -> list[torch.Tensor]:
        """Return K and V, [num_seqs, heads, length, size]."""
        both = ops.gather_cache(self.cache, self.tables, self.lengths)
        return [
            rows.view(num_seqs, length, KV_HEADS, SIZE).transpose(1, 2).contiguous()
            for rows in both
            if rows is not None
        ]

    def calls(self) -> dict[str, Callable[[], torch.Tensor]]:
        """The contenders."""
        return {
            "shared": partial(self.attend, self.tables, self.on_device),
            "apart": partial(self.attend, self.apart_tables, None),
            "sdpa": self.sdpa,
        }

    def check(self) -> None:
        """AssertionError unless all give the same."""
        found = {name: call() for name, call in self.calls().items()}
        for name in ("apart", "sdpa"):
            torch.testing.assert_close(found["shared"], found[name], rtol=TOLERANCE, atol=TOLERANCE)


def cold_seconds(flush: torch.Tensor, call: Callable[[], object], number: int) -> float:
    """Return the seconds of a call on a GPU, whose cache holds nothing of it."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    flush.zero_()
    start.record()
    call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3


def settled_seconds(call: Callable[[], object], number: int) -> float:
    """Return the seconds of a call on a CPU after others: torch's threads look for work for a while after theirs."""
    for _ in range(SETTLING):
        call()
    return seconds(call, number)


def peer_seconds(peer: PeerProcess) -> float:
    """Return the seconds of a call of vLLM's, after others: its threads fall asleep, too."""
    for _ in range(SETTLING):
        peer.ask()
    return float(peer.ask()["seconds"])


def measure_on(device: torch.device) -> Measure:
    """Return what measures a call on a device."""
    if device.type == "cpu":
        return settled_seconds
    return partial(cold_seconds, torch.empty(FLUSHED_BYTES, dtype=torch.uint8, device=device))


def measure(
    dtype: str, num_seqs: int, shared: int, own: int, device: torch.device, rounds: int, peer: PeerProcess | None
) -> Row:
    case, clock = Case(num_seqs, shared, own, device, DTYPES[dtype]), measure_on(device)
    case.check()
    source, target = torch.ones(2, case.num_bytes // 2, dtype=torch.uint8, device=device)
    own_calls: dict[str, Callable[[], object]] = {**case.calls(), "bound": lambda: target.copy_(source)}
    calls = {name: partial(clock, call, 1) for name, call in own_calls.items()}
    answer = {}
    if peer is not None:
        answer = ask_for(peer, case, shared)
        calls["vllm"] = partial(peer_seconds, peer)
    taken = in_turns(calls, rounds, measure=result)
    (planned,) = in_turns({"plan": case.plan}, rounds).values()
    return {
        **{"dtype": dtype, "seqs": num_seqs, "shared": shared, "own": own, **answer},
        **{f"{name} us": Figure.of(taken[name], 1e6) for name in calls},
        "times": Figure.ratio(taken["apart"], taken["shared"]),
        "of bound": Figure.ratio(taken["bound"], taken["shared"]),
        **{f"x {name}": Figure.ratio(taken[name], taken["shared"]) for name in ("sdpa", "vllm") if name in taken},
        "plan us": Figure.of(planned, 1e6),
    }


def ask_for(peer: PeerProcess, case: Case, shared: int) -> dict[str, str]:
    """Have vLLM make the same step, and compare it with torch's attention. Return the instructions that it takes."""
    dtype, num_seqs = str(case.query.dtype).removeprefix("torch."), len(case.lengths)
    shape = (KV_HEADS, HEADS // KV_HEADS, SIZE)
    return peer.ask(
        lengths=case.lengths, queries=[1] * num_seqs, shared=shared, shape=shape, dtype=dtype,
        threads=torch.get_num_threads(),
    )  # fmt: skip


def main() -> None:
    options = parse(
        "shared_prefix",
        __doc__,
        device=DEVICE,
        threads=2,
        rounds=9,
        seqs=option([8, 32], "decoded together"),
        shared=option([1024, 4096], "tokens that all begin with"),
        own=option([128], "tokens of each after them"),
        dtypes=option(["bf16", "fp32"], "of queries and blocks", choices=list(DTYPES)),
        seconds=option(math.inf, "after which no further case begins"),
        vllm=VLLM,
        loop=option(False, "measure an engine's steps, too; on the CPU"),
    )
    torch.manual_seed(0)
    device = torch.device(options.device)
    deadline = time.monotonic() + options.seconds
    all_cases = itertools.product(options.dtypes, options.seqs, options.shared, options.own)
    cases = itertools.takewhile(lambda case: time.monotonic() < deadline, all_cases)
    python = options.vllm if device.type == "cpu" else None
    with vllm_peer(python, "attention", options.threads, preloads=True) as peer:
        rows = shown(COLUMNS, (measure(*case, device, options.rounds, peer) for case in cases))
        version = peer.hello["vllm"] if peer else None
    aims = [row for row in rows if device.type == "cpu" and (row["seqs"], row["shared"], row["own"]) == TARGET_CASE]
    met = [row["times"].median >= TARGET for row in aims]
    loop = shown(LOOP_COLUMNS, loop_rows(options)) if options.loop else []
    met += [row["times"].median >= LOOP_TARGET for row in loop if row["loop"] in ("samples", "beams", "chats")]
    finish(
        options,
        lambda path: curves(
            path, rows, "shared", ["times"], ("dtype", "seqs", "own"), lines=[1.0], ylabel="times as fast as apart"
        ),
        vllm=version,
        results=rows,
        loop_results=loop,
        targets_met=all(met) if met else None,
    )


if __name__ == "__main__":
    main()
