"""How small do lossless codecs make K and V, and how fast, beside one copy of as many bytes?

Numbers of several kinds, in one thread, back and forth:
- normal: normally distributed, as K and V of a random model are
- heavy: with heavy tails, by Student's t of three degrees
- trained: K and V of the small Llama that bench_blend trains, all layers of all documents of a batch
- random: random bits, which no codec makes smaller

- split: kvpage's own (csrc/codec/exponent_codec.h): exponents apart, in a few bits
- zstd: the bytes of equal places together, by zstandard

`in` and `out` are GB of K and V a second of the thread's own time, into memory that is there. The digests of the coded
bytes are made, and checked, on the way. The bound is one copy of K and V, memory to memory. First each payload must
give the numbers back, bit by bit.

Targets: split makes bf16 of `normal`, `heavy` and `trained` at least 1.30 times smaller, at 5 GB/s in and 8 GB/s out,
fp8 1.1 times, and nothing more than 0.5 % larger.
"""

import argparse
import functools
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch

import kvpage._C as _C
from kvpage.benchmarks import blend_model, blend_task
from kvpage.benchmarks.cells import Row, shown
from kvpage.benchmarks.figure import Figure, in_turns, thread_seconds
from kvpage.benchmarks.pictures import grouped
from kvpage.benchmarks.script import finish, option, parse
from kvpage.store.records.codec import SPLIT_KINDS, get_codec
from kvpage.store.tiers.stretches import digests_of

KINDS = ("normal", "heavy", "trained", "random")
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "fp8_e4m3": torch.float8_e4m3fn}
CODECS = ("split", "zstd")
STRETCH = 1 << 20
LEAST_RATIO, LEAST_FP8, MOST_LARGER, LEAST_IN, LEAST_OUT = 1.30, 1.1, 1.005, 5.0, 8.0
COLUMNS = "{numbers:<9} {dtype:<9} {codec:<6} {ratio:>6.3f} {in GB/s:>18.2f} {out GB/s:>18.2f} {bound GB/s:>18.2f}"
Bytes = np.ndarray


def trained_rows(options: argparse.Namespace) -> torch.Tensor:
    """Return K and V of the trained model over documents, fp32."""
    config = blend_model.TrainingConfig(0, options.layers, options.hidden)
    model, attention = blend_model.load_or_train(config, options.cache)
    rows: list[torch.Tensor] = []

    def keep(layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> blend_model.Rows:
        rows.extend((key.flatten(), value.flatten()))
        return key, value

    attention.swap = keep
    with torch.no_grad():
        model(blend_task.write_documents(options.documents, config.num_tokens, seed=0).tokens)
    return torch.cat(rows)


def numbers_of(kind: str, size: int, options: argparse.Namespace) -> torch.Tensor:
    """Return so many numbers in fp32. A trained model's are repeated, layer by layer, up to their number."""
    generator = np.random.default_rng(0)
    if kind == "trained":
        rows = trained_rows(options)
        return rows.repeat(-(-size // len(rows)))[:size]
    values = generator.standard_normal(size) if kind == "normal" else generator.standard_t(3, size)
    return torch.from_numpy(values.astype(np.float32))


def raw_of(kind: str, dtype: torch.dtype, size: int, options: argparse.Namespace) -> Bytes:
    if kind == "random":
        return np.random.default_rng(0).integers(0, 256, size * dtype.itemsize, dtype=np.uint8)
    raw: Bytes = numbers_of(kind, size, options).clamp(-440, 440).to(dtype).view(torch.uint8).numpy()
    return raw


class Split:
    """kvpage's codec, between memory that is there."""

    def __init__(self, dtype: torch.dtype, raw: Bytes) -> None:
        self._kind, self._raw, self.back = SPLIT_KINDS[dtype], raw, np.zeros_like(raw)
        self._room = np.zeros(_C.most_payload_bytes(self._kind, raw.nbytes), np.uint8)
        self.payload = self._room

    def encode(self) -> None:
        """Code, and make the digests."""
        size = _C.encode_exponents(self._kind, self._raw.ctypes.data, self._raw.nbytes, self._room)
        self.payload = self._room[:size]
        self.digests = digests_of(self.payload, STRETCH)

    def decode(self) -> None:
        """Check the digests, and decode."""
        assert digests_of(self.payload, STRETCH) == self.digests
        _C.decode_exponents(self._kind, self.payload.ctypes.data, self.payload.nbytes, self.back)


class Zstd:
    """The codec zstd, as the store calls it."""

    def __init__(self, dtype: torch.dtype, raw: Bytes) -> None:
        self._codec, self._raw, self._shape = get_codec("zstd", dtype), raw, (1, 1, 1, 1, raw.nbytes // dtype.itemsize)

    def encode(self) -> None:
        """Code, and make the digests."""
        self.payload = np.frombuffer(self._codec.encode(self._raw.data, self._shape), np.uint8)
        self.digests = digests_of(self.payload, STRETCH)

    def decode(self) -> None:
        """Check the digests, and decode."""
        assert digests_of(self.payload, STRETCH) == self.digests
        self.back = np.frombuffer(self._codec.decode(self.payload.data, self._raw.nbytes, self._shape), np.uint8)


MAKERS: dict[str, type[Split] | type[Zstd]] = {"split": Split, "zstd": Zstd}


def measure(kind: str, dtype: str, options: argparse.Namespace) -> Iterator[Row]:
    raw = raw_of(kind, DTYPES[dtype], options.elements, options)
    target = np.zeros_like(raw)
    codecs: dict[str, Split | Zstd] = {}
    for name, make in MAKERS.items():
        if name in options.codecs:
            codecs[name] = make(DTYPES[dtype], raw)
            codecs[name].encode()
            codecs[name].decode()
            assert np.array_equal(codecs[name].back, raw), f"{name} did not give the numbers back"
    calls: dict[str, Callable[[], object]] = {"copy": lambda: np.copyto(target, raw)}
    for name, codec in codecs.items():
        calls |= {f"{name} in": codec.encode, f"{name} out": codec.decode}
    taken = in_turns(calls, options.rounds, measure=thread_seconds)
    speeds = {name: Figure.rate(raw.nbytes / 1e9, times) for name, times in taken.items()}
    for name, codec in codecs.items():
        ratio = raw.nbytes / codec.payload.nbytes
        rates = {"in GB/s": speeds[f"{name} in"], "out GB/s": speeds[f"{name} out"], "bound GB/s": speeds["copy"]}
        yield {"numbers": kind, "dtype": dtype, "codec": name, "ratio": ratio, **rates}


def is_met(row: Row) -> bool:
    """Whether split's row is as small and as fast as it shall be."""
    if row["numbers"] == "random":
        return row["ratio"] >= 1 / MOST_LARGER
    if row["dtype"] == "bfloat16":
        is_fast = row["in GB/s"].median >= LEAST_IN and row["out GB/s"].median >= LEAST_OUT
        return row["ratio"] >= LEAST_RATIO and is_fast
    return row["ratio"] >= (LEAST_FP8 if row["dtype"] == "fp8_e4m3" else 1)


def draw(rows: list[Row], path: Path) -> None:
    names = list(dict.fromkeys(f"{row['numbers']} {row['dtype']}" for row in rows))
    by_codec = {codec: [row["ratio"] for row in rows if row["codec"] == codec] for codec in CODECS}
    grouped(path, names, {name: values for name, values in by_codec.items() if values}, "times smaller", lines=[1])


def main() -> None:
    options = parse(
        "codec",
        __doc__,
        rounds=9,
        threads=1,
        elements=option(1 << 22, "numbers of each kind"),
        kinds=option(list(KINDS), choices=KINDS),
        dtypes=option(list(DTYPES), choices=list(DTYPES)),
        codecs=option(list(CODECS), choices=CODECS),
        layers=option(6, "of the trained model"),
        hidden=option(128, "of the trained model"),
        documents=option(16, "that the trained model reads"),
        cache=option(blend_model.CACHE, "where trained models are kept", type=Path),
    )
    cases = itertools.product(options.kinds, options.dtypes)
    rows = shown(COLUMNS, (row for case in cases for row in measure(*case, options)))
    met = all(is_met(row) for row in rows if row["codec"] == "split")
    finish(options, functools.partial(draw, rows), rows=rows, targets_met=met)


if __name__ == "__main__":
    main()
