"""What the GPU benchmarks launch, over a device that is not there: a call for each kind of launch.

    for name, call in launches(device):    "decode llama 3 8B bfloat16", ...
        call()                             Triton compiles, and fake_device.py keeps the launch

Shapes, dtypes and lengths are those of the benchmarks, since Triton compiles for them. Tensors are made when a call
runs, and most of their memory is never touched.
"""

import functools
from collections.abc import Callable, Iterator

import torch

from kvpage import CacheLayout, ops
from kvpage.benchmarks import bench_launch, bench_paged_attention, bench_reshape_gather
from kvpage.benchmarks.fake_device import FakeDevice
from kvpage.benchmarks.paged_case import Model
from kvpage.kernels import chunk as chunk_kernels
from kvpage.kernels import sampling_launch
from kvpage.layout.attention import Attention
from kvpage.layout.sampling_record import RECORD_WORDS
from kvpage.ops.args.sequences import num_decodes
from kvpage.ops.cuda.chunks import HOST_PROGRAMS
from kvpage.ops.cuda.sampling import SamplingMemory

Call = Callable[[], object]
BF16 = torch.bfloat16
SMOKE, QWEN3 = Model("flash", 2, 8, 64, 64, 16), Model("flash", 8, 16, 128, 128, 16)
SMOKE_QUERIES, SMOKE_LENGTHS = (1, 20, 1), (70, 33, 5)
VOCAB_SIZE, SAMPLED_ROWS = 151936, 64
ANY_PROGRAMS = 2**31 - 1


def launches(device: FakeDevice) -> Iterator[tuple[str, Call]]:
    """Yield the name and the call of each kind of launch; none has run yet. device: that is active."""
    yield from bench_launch.make_calls(device).items()
    yield from smoke_launches(device)
    yield from attention_launches(device)
    yield from serving_launches(device)
    yield from row_launches(device)
    for dtype in (torch.float32, BF16):
        yield f"sample {_word(dtype)}", functools.partial(sample, dtype)


def attention_launches(device: FakeDevice) -> Iterator[tuple[str, Call]]:
    """Yield those of bench_paged_attention."""
    for kind, name, dtype, num_seqs, length, num_queries in bench_paged_attention.cases(
        bench_paged_attention.SIZES["whole"]
    ):
        queries = [num_queries] * num_seqs
        call = functools.partial(
            attend, device, bench_paged_attention.MODELS[name], dtype, queries, length, torch.int32
        )
        yield f"{kind} {name} {_word(dtype)} {num_seqs} {length} {num_queries}", call


def serving_launches(device: FakeDevice) -> Iterator[tuple[str, Call]]:
    """Yield those of an engine's steps: decodes, prompts and both at once, with lengths of 64 bits."""
    steps = {"decode": [1] * 64, "prompt": [1024] * 4, "mixed": [1] * 8 + [1000], "short": [5], "turn": [100]}
    for name, queries in steps.items():
        for length in (1024, 1280):
            yield f"step {name} {length}", functools.partial(attend, device, QWEN3, BF16, queries, length, torch.int64)


def smoke_launches(device: FakeDevice) -> Iterator[tuple[str, Call]]:
    """Yield those of tests/gpu/test_smoke.py."""
    layout = CacheLayout(16, 2, 64, BF16)
    yield "smoke rows", functools.partial(write_and_gather, device, layout, 70)
    for queries in ([1] * 3, list(SMOKE_QUERIES)):
        call = functools.partial(attend, device, SMOKE, BF16, queries, max(SMOKE_LENGTHS), torch.int32)
        yield f"smoke attention {queries}", call
    for to_chunk in (True, False):
        yield f"smoke chunk {to_chunk}", functools.partial(move_chunk, layout, 2, 40, to_chunk, ANY_PROGRAMS)


def row_launches(device: FakeDevice) -> Iterator[tuple[str, Call]]:
    """Yield those of bench_reshape_gather."""
    for case in bench_reshape_gather.cases("cuda"):
        for num_tokens in (64, 65536):
            call = functools.partial(write_and_gather, device, case.layout, num_tokens)
            yield f"rows {case.name} {num_tokens}", call
        for num_tokens in bench_reshape_gather.CHUNK_TOKENS:
            for to_chunk in (True, False):
                for programs in (ANY_PROGRAMS, HOST_PROGRAMS):
                    call = functools.partial(move_chunk, case.layout, case.num_layers, num_tokens, to_chunk, programs)
                    yield f"chunk {case.name} {num_tokens} {to_chunk} {programs}", call


def attend(
    device: FakeDevice, model: Model, dtype: torch.dtype, queries: list[int], length: int, lengths_dtype: torch.dtype
) -> None:
    """Attend over sequences of one length, as benchmarks and engines do: one query each, or counts on the device."""
    layout = CacheLayout(model.block_size, model.num_kv_heads, model.key_size, dtype, model.backend)
    cache = device.bound(torch.empty(layout.shape(2), dtype=dtype), layout)
    tables = torch.zeros(len(queries), -(-length // model.block_size), dtype=torch.int32)
    lengths, counts = (
        torch.full((len(queries),), length, dtype=lengths_dtype),
        torch.tensor(queries, dtype=lengths_dtype),
    )
    is_decode = max(queries) == 1
    sequences = ops.Sequences.of_step(
        cache, sum(queries), tables, lengths, None if is_decode else counts, max(queries), length,
        0 if is_decode else num_decodes(queries),
    )  # fmt: skip
    query = torch.empty(sum(queries), model.num_heads, model.key_size, dtype=BF16)
    ops.attend(query, cache, sequences, Attention(model.key_size**-0.5, value_size=model.value_size))


def write_and_gather(device: FakeDevice, layout: CacheLayout, num_tokens: int) -> None:
    """Write rows into blocks, and gather them as one sequence."""
    num_blocks = -(-num_tokens // layout.block_size)
    cache = device.bound(torch.empty(layout.shape(num_blocks), dtype=layout.dtype), layout)
    key = torch.empty(num_tokens, layout.num_kv_heads, layout.head_size, dtype=BF16)
    value = None if layout.backend == "mla" else torch.empty_like(key)
    ops.reshape_and_cache(key, value, cache, torch.zeros(num_tokens, dtype=torch.int64))
    tables = torch.zeros(1, num_blocks, dtype=torch.int32)
    ops.gather_cache(cache, tables, [num_tokens], out=(key, value))


def move_chunk(layout: CacheLayout, num_layers: int, num_tokens: int, to_chunk: bool, max_programs: int) -> None:
    """Move a chunk of all layers. max_programs: HOST_PROGRAMS for pinned memory, else ANY_PROGRAMS."""
    num_blocks, parts = -(-(num_tokens + 5) // layout.block_size), 1 if layout.backend == "mla" else 2
    caches = [torch.empty(layout.shape(num_blocks), dtype=layout.dtype) for _ in range(num_layers)]
    shape = num_layers, parts, num_tokens, layout.num_kv_heads, layout.head_size
    chunk, ids = torch.empty(shape, dtype=layout.dtype), torch.zeros(num_blocks, dtype=torch.int32)
    error = torch.zeros(1, dtype=torch.int32)
    chunk_kernels.move_chunk(caches, layout.views(caches[0]), ids, 5, chunk, None, error, to_chunk, max_programs)


def sample(dtype: torch.dtype) -> None:
    """Choose a token from each row of logits of Qwen3's vocabulary."""
    logits = torch.empty(SAMPLED_ROWS, VOCAB_SIZE, dtype=dtype)
    records = torch.zeros(SAMPLED_ROWS, RECORD_WORDS, dtype=torch.int64)
    positions, out = torch.zeros(SAMPLED_ROWS, dtype=torch.int64), torch.zeros(SAMPLED_ROWS, dtype=torch.int32)
    memory = SamplingMemory.make(SAMPLED_ROWS, VOCAB_SIZE, "cpu")
    tensors = memory.tops, memory.shares, memory.lists, memory.held
    sampling_launch.sample_rows(logits, records, positions, out, *tensors)


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
