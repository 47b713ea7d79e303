"""Every kernel once: compiled for a GPU that is not there, launched, repeated, and launched while a profiler listens.

    python tests/support/launch_kernels.py [WORD]       a line of JSON for each case with this word in its name

So it is seen what the Triton that is installed makes of the kernels. A line holds the case, and the error if there was
any.
"""

import contextlib
import itertools
import json
import multiprocessing
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
from triton.compiler import CompiledKernel
from triton.runtime import driver

sys.path.insert(0, str(Path(__file__).parents[1]))
from support.attention_compiled import BF16, E4M3, FP32, INT8  # noqa: E402
from support.attention_compiled import CASES as ATTENTION  # noqa: E402

from kvpage import CacheLayout, KVScales  # noqa: E402
from kvpage.benchmarks.compiling_driver import SHARED_MEMORY, CompilingDriver, Launch  # noqa: E402
from kvpage.kernels.attention_launch import Device, DeviceSequences, Rows, paged_attention  # noqa: E402
from kvpage.kernels.attention_shared import paged_attention as attend_shared
from kvpage.kernels.blend import row_deviation  # noqa: E402
from kvpage.kernels.chunk import move_chunk  # noqa: E402
from kvpage.kernels.gate import gate  # noqa: E402
from kvpage.kernels.gather import gather_cache, gather_cache_by_device_lengths  # noqa: E402
from kvpage.kernels.heads import write_heads  # noqa: E402
from kvpage.kernels.norm import add_norm, rms_norm  # noqa: E402
from kvpage.kernels.reshape import reshape_and_cache  # noqa: E402
from kvpage.kernels.rope import rope  # noqa: E402
from kvpage.kernels.rotary import mix_rows  # noqa: E402
from kvpage.kernels.row_grid import RowGrid  # noqa: E402
from kvpage.kernels.sampling_launch import sample_rows  # noqa: E402
from kvpage.layout.attention import Attention
from kvpage.layout.rotation import Rotation  # noqa: E402
from kvpage.layout.row_norm import RowNorm  # noqa: E402
from kvpage.ops import SAMPLING_RECORD_WORDS, SamplingMemory  # noqa: E402

CPU, ERROR = torch.device("cpu"), torch.zeros(1, dtype=torch.int32)
NUM_TOKENS, VOCAB_SIZE = 33, 151_936
IDS, TABLES = torch.zeros(4, dtype=torch.int32), torch.zeros(2, 3, dtype=torch.int32)
Call = Callable[[], object]
NUMBERS = itertools.count(200)  # of devices


class KeepingDriver(CompilingDriver):
    """Keeps the name and the grid of each launch."""

    def __init__(self, arch: int) -> None:
        super().__init__(next(NUMBERS), arch)  # kernels keep a launcher for each number
        self.launches: list[tuple[str, tuple[int, int, int]]] = []

    def take(self, launch: Launch, source: Any, metadata: Any) -> None:
        self.launches.append(launch[:2])


def rows(kernel: str, dtype: torch.dtype) -> Call:
    """Return a call that moves rows in bf16, for caches of this dtype."""
    layout = CacheLayout(16, 8, 128, dtype)
    caches = layout.allocate(9, 2, CPU)
    views = layout.views(caches[0])
    scales = KVScales.of(1, [2.0] * 8) if dtype == E4M3 else None
    key, value = torch.zeros(2, NUM_TOKENS, 8, 128, dtype=BF16)
    chunk = torch.zeros(1, 2, 8, NUM_TOKENS, 128, dtype=BF16).transpose(2, 3)
    slots, lengths = torch.zeros(NUM_TOKENS, dtype=torch.int64), IDS[:2]
    moved = caches[:1], views, IDS, 0, chunk, None if scales is None else [scales], ERROR
    return {
        "reshape": lambda: reshape_and_cache(key, value, views, slots, scales, ERROR),
        "gather": lambda: gather_cache(views, TABLES, [0, 5], [30, 3], (key, value), scales, ERROR),
        "gather by device lengths": lambda: gather_cache_by_device_lengths(
            views, TABLES, None, lengths, (key, value), scales, ERROR
        ),
        "store chunk": lambda: move_chunk(*moved, True),
        "load chunk": lambda: move_chunk(*moved, False),
        "chunk in a graph": lambda: move_chunk(*moved, True, one_by_one=True),
    }[kernel]


def mix(is_interleaved: bool) -> Call:
    rows, fresh = torch.zeros(2, NUM_TOKENS, 8, 128, dtype=BF16)
    angles = torch.zeros(NUM_TOKENS, 64)
    rotation = Rotation(angles, angles, 128, 0, is_interleaved)
    ids = torch.arange(NUM_TOKENS)
    return lambda: mix_rows(rows, rows, rotation, fresh, ids, None, None, ERROR)


def deviation() -> Call:
    fresh, retrieved = torch.zeros(2, NUM_TOKENS, 8, 128, dtype=BF16)
    valid = torch.ones(NUM_TOKENS, dtype=torch.bool)
    return lambda: row_deviation(fresh, retrieved, valid)


def norm(dtype: torch.dtype) -> Call:
    x, weight = torch.zeros(NUM_TOKENS, 12, 128, dtype=dtype), torch.ones(128, dtype=dtype)
    out = torch.empty(NUM_TOKENS, 8, 128, dtype=dtype)
    return lambda: rms_norm(x[:, :8], RowGrid.of(x[:, :8]), weight, out, 1e-6, 0.0, True)


def gated(activation: str) -> Call:
    gates, ups = torch.zeros(NUM_TOKENS, 6144, dtype=BF16).chunk(2, -1)
    return lambda: gate(gates, RowGrid.of(gates), ups, RowGrid.of(ups), torch.empty_like(gates), activation)


def turned() -> Call:
    query, key = torch.zeros(NUM_TOKENS, 24, 128, dtype=BF16).split([16, 8], 1)
    cos, sin = torch.zeros(2, NUM_TOKENS, 128, dtype=BF16)
    outs = [torch.empty(part.shape, dtype=BF16) for part in (query, key)]
    return lambda: rope(query, key, cos, sin, *outs)


def summed(has_first: bool) -> Call:
    """Return a call of a sum and its norm, with a norm before it or without."""
    x, residual, total, out = torch.zeros(4, NUM_TOKENS, 1024, dtype=BF16)
    norm, grid = RowNorm(torch.ones(1024, dtype=BF16), 1e-6, 0.0, True), RowGrid.of(x)
    return lambda: add_norm(x, grid, residual, grid, norm if has_first else None, norm, total, out)


def heads(dtype: torch.dtype, has_norms: bool, backend: str = "flash") -> Call:
    """Return a call that writes heads in bf16, for caches of this dtype."""
    layout = CacheLayout(16, 8, 128, dtype, backend=backend)
    views, scales = layout.views(layout.allocate(9, 1, CPU)[0]), KVScales.of(1, [2.0] * 8) if dtype == E4M3 else None
    query, key, value = torch.zeros(NUM_TOKENS, 32, 128, dtype=BF16).split([16, 8, 8], 1)
    cos, sin = torch.zeros(2, NUM_TOKENS, 128, dtype=BF16)
    norm = RowNorm(torch.ones(128, dtype=BF16), 1e-6, 0.0, True)
    norms, out = (norm, norm) if has_norms else None, torch.empty(NUM_TOKENS, 16, 128, dtype=BF16)
    slots = torch.zeros(NUM_TOKENS, dtype=torch.int64)
    return lambda: write_heads(query, key, value, norms, cos, sin, out, views, slots, scales, ERROR)


def attention(name: str, arch: int = 90) -> Call:
    """Return a call of a case of attention_compiled, with splits of the keys, which are merged."""
    case = ATTENTION[name]
    layout, group, queries, value_size = (case[name] for name in ("layout", "group", "queries", "value_size"))
    views = layout.views(layout.allocate(2, 1, CPU)[0])
    given = torch.ones(2, layout.block_size, layout.num_kv_heads) if layout.dtype == E4M3 else None
    key, value = (view and Rows(view.rows, view.scales if given is None else given) for view in views)
    query = torch.zeros(queries, layout.num_kv_heads * group, layout.head_size, dtype=case["query_dtype"])
    counts = None if queries == 1 else torch.tensor([queries])
    sequences = DeviceSequences(TABLES[:1], torch.ones(1, dtype=torch.int64), counts, 2**17, queries)
    device = Device(ERROR, 132, arch, SHARED_MEMORY[arch])
    out = query.new_empty(*query.shape[:2], value_size)
    return lambda: paged_attention(query, out, key, value, sequences, case["options"], device)


def shared_keys(size: int, **options: Any) -> Call:
    """Return a call of four decodes whose plan has room for two groups."""
    layout = CacheLayout(16, 8, size, BF16)
    key, value = (view and Rows(view.rows, None) for view in layout.views(layout.allocate(2, 1, CPU)[0]))
    query = torch.zeros(4, 32, size, dtype=BF16)
    tables, plan = torch.zeros(4, 3, dtype=torch.int32), torch.zeros(9, 4, dtype=torch.int64)
    sequences = DeviceSequences(tables, torch.ones(4, dtype=torch.int64), None, 2**17, 1, shared=plan)
    device, out = Device(ERROR, 132, 90, SHARED_MEMORY[90]), torch.zeros_like(query)
    return lambda: attend_shared(query, out, key, value, sequences, Attention(1.0, **options), device)


def sampling(dtype: torch.dtype) -> Call:
    memory = SamplingMemory.make(1, VOCAB_SIZE, "cpu")
    records = torch.zeros(1, SAMPLING_RECORD_WORDS, dtype=torch.int64)
    tensors = torch.zeros(1, VOCAB_SIZE, dtype=dtype), records, torch.zeros(1, dtype=torch.int64), ERROR
    return lambda: sample_rows(*tensors, memory.tops, memory.shares, memory.lists, memory.held)


CASES: dict[str, tuple[int, Callable[[], Call]]] = {
    "reshape bf16": (90, partial(rows, "reshape", BF16)),
    "reshape e4m3": (80, partial(rows, "reshape", E4M3)),
    "gather bf16": (90, partial(rows, "gather", BF16)),
    "gather int8": (80, partial(rows, "gather by device lengths", INT8)),
    "store chunk": (90, partial(rows, "store chunk", BF16)),
    "load chunk e4m3": (80, partial(rows, "load chunk", E4M3)),
    "chunk in a graph": (90, partial(rows, "chunk in a graph", BF16)),
    "mix rows": (90, partial(mix, False)),
    "mix rows, interleaved": (80, partial(mix, True)),
    "deviation": (90, deviation),
    "norm": (90, partial(norm, BF16)),
    "norm fp32": (80, partial(norm, FP32)),
    "gate, silu": (90, partial(gated, "silu")),
    "gate, gelu": (80, partial(gated, "gelu_tanh")),
    "rope": (90, turned),
    "sum and norm": (90, partial(summed, False)),
    "norm, sum and norm": (80, partial(summed, True)),
    "heads": (90, partial(heads, BF16, True)),
    "heads, no norms": (80, partial(heads, BF16, False)),
    "heads e4m3": (80, partial(heads, E4M3, True)),
    "heads int8": (90, partial(heads, INT8, True)),
    "heads paged": (80, partial(heads, BF16, True, "paged")),
    "decode": (90, partial(attention, "decode")),
    "decode, all options": (80, partial(attention, "decode, all options", 80)),
    "decode e4m3": (90, partial(attention, "decode e4m3")),
    "decode e4m3 by integers": (80, partial(attention, "decode e4m3", 80)),
    "decode int8": (90, partial(attention, "decode int8")),
    "decode paged": (80, partial(attention, "decode paged", 80)),
    "decode latents": (90, partial(attention, "decode mla")),
    "decode latents e4m3": (90, partial(attention, "decode mla e4m3, 16 heads")),
    "decode fp32 latents, 99 KiB": (89, partial(attention, "decode fp32 mla", 89)),
    "decode shared keys": (90, partial(shared_keys, 128)),
    "decode shared keys, a window": (90, partial(shared_keys, 64, sliding_window=100)),
    "prefill": (90, partial(attention, "prefill")),
    "prefill, all options": (80, partial(attention, "prefill, all options", 80)),
    "prefill e4m3": (90, partial(attention, "prefill e4m3")),
    "prefill fp32": (80, partial(attention, "prefill fp32", 80)),
    "prefill 256, 99 KiB": (89, partial(attention, "prefill 256", 89)),
    "sample fp32": (80, partial(sampling, FP32)),
    "sample bf16": (90, partial(sampling, BF16)),
}
"""For each case the compute capability, and what makes a call that launches it."""


@contextlib.contextmanager
def profiler(hook: Callable[[Any], None]) -> Iterator[None]:
    """Let Triton call a hook before each launch inside."""
    hooks: Any = triton.knobs.runtime if hasattr(triton, "knobs") else CompiledKernel
    chain = hooks.launch_enter_hook
    if hasattr(chain, "add"):
        chain.add(hook)
    else:
        hooks.launch_enter_hook = staticmethod(hook) if hooks is CompiledKernel else hook
    try:
        yield
    finally:
        if hasattr(chain, "add"):
            chain.remove(hook)
        else:
            hooks.launch_enter_hook = chain


def launch(name: str) -> None:
    """Launch a case three times. AssertionError unless each launches the same, and a profiler hears of it."""
    arch, make = CASES[name]
    device, heard, made = KeepingDriver(arch), [], []
    driver.set_active(device)
    call = make()
    for watched in (False, False, True):
        device.launches.clear()
        with profiler(heard.append) if watched else contextlib.nullcontext():
            call()
        made.append(list(device.launches))
    assert made[0] and made[0] == made[1] == made[2], f"launches must be the same each time, got {made}"
    assert len(heard) == len(made[2]), f"a profiler must hear of {len(made[2])} launches, heard of {len(heard)}"


def root_of(error: BaseException) -> str:
    """Return the first of the errors that led to this one."""
    while error.__cause__ or error.__context__:
        error = error.__cause__ or error.__context__  # type: ignore[assignment]  # one of them is there
    return repr(error)


def send_error(name: str, pipe: Any) -> None:
    """Launch a case, and send the error, or None."""
    torch.set_num_threads(1)  # the threads of the process that was forked are not here: work for them would never end
    try:
        launch(name)
        pipe.send(None)
    except Exception as error:  # of whatever kind a compiler raises
        pipe.send(root_of(error))


def error_of(name: str) -> str | None:
    """Return the error of a case. It has a process of its own: a compiler may end it."""
    fork = multiprocessing.get_context("fork")
    receiver, sender = fork.Pipe(duplex=False)
    process = fork.Process(target=send_error, args=(name, sender))
    process.start()
    sender.close()
    try:
        error: str | None = receiver.recv()
    except EOFError:
        error = "the compiler ended the process"
    process.join()
    return error


def main(word: str = "") -> int:
    errors = []
    for name in CASES:
        if word in name:
            errors.append(error_of(name))
            print(json.dumps({"case": name, "error": errors[-1]}), flush=True)
    return int(any(errors))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
