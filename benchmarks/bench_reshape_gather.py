"""How near do writing and gathering tokens come to copying as many bytes?

The bound is memory: a torch copy_ of as many contiguous bytes as the operation moves, K and V together, with as many
threads, measured in the same run, alternating with the operation. Results are checked before anything is timed. On a
CUDA device (--device cuda) the same, timed by events; the first call, which compiles, is not timed.

    python benchmarks/bench_reshape_gather.py [--device cpu|cuda] [--tokens N ...] [--plot PATH]
"""

import argparse
import json
import platform
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from kvpage import CacheLayout, ops

BLOCK_SIZE, NUM_HEADS, HEAD_SIZE, DTYPE = 16, 8, 128, torch.bfloat16  # Llama 3 8B: 4 KiB a token and layer


def seconds(call: Callable[[], object], device: str) -> float:
    if device == "cuda":
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3
    before = time.perf_counter()
    call()
    return time.perf_counter() - before


def fastest(calls: Sequence[Callable[[], object]], device: str, rounds: int) -> list[float]:
    """The least time of each call, others being noise; the calls take turns, so that a noisy moment meets them all."""
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(rounds + 2):
        for call, taken in zip(calls, times, strict=True):
            taken.append(seconds(call, device))
    return [min(taken[2:]) for taken in times]


def measure(kv_layout: str, num_tokens: int, device: str, rounds: int) -> list[dict]:
    layout = CacheLayout(BLOCK_SIZE, NUM_HEADS, HEAD_SIZE, DTYPE, kv_layout=kv_layout)
    num_blocks = 4 * -(-num_tokens // BLOCK_SIZE)
    cache = layout.allocate(num_blocks, 1, torch.device(device))[0].normal_()
    used = torch.randperm(num_blocks)[: -(-num_tokens // BLOCK_SIZE)]
    slots = (used[:, None] * BLOCK_SIZE + torch.arange(BLOCK_SIZE)).flatten()[:num_tokens].to(device)
    tables = used.to(torch.int32)[None].to(device)
    key, value = torch.randn(2, num_tokens, NUM_HEADS, HEAD_SIZE, device=device).to(DTYPE)
    out = torch.empty_like(key), torch.empty_like(value)
    source = torch.randn(2 * key.numel(), device=device).to(DTYPE)
    target = torch.empty_like(source)

    def reshape() -> None:
        ops.reshape_and_cache(key, value, cache, slots, layout)

    def gather() -> None:
        ops.gather_cache(cache, tables, [num_tokens], layout, out=out)

    reshape(), gather()
    assert torch.equal(out[0], key) and torch.equal(out[1], value), "gathered is not what was written"
    copy, *taken = fastest([lambda: target.copy_(source), reshape, gather], device, rounds)
    num_bytes = source.numel() * source.element_size()
    return [
        {
            "operation": name,
            "layout": kv_layout,
            "tokens": num_tokens,
            "MiB": num_bytes / 2**20,
            "us": time_taken * 1e6,
            "GB/s": 2 * num_bytes / time_taken / 1e9,  # read and written
            "of copy": copy / time_taken,
        }
        for name, time_taken in zip(("reshape_and_cache", "gather_cache"), taken, strict=True)
    ]


def plot(results: list[dict], path: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4))
    for name in ("reshape_and_cache", "gather_cache"):
        for kv_layout, style in (("NHD", "-"), ("HND", "--")):
            rows = [r for r in results if r["operation"] == name and r["layout"] == kv_layout]
            axes.plot([r["tokens"] for r in rows], [r["of copy"] for r in rows], style, label=f"{name}, {kv_layout}")
    axes.axhline(1.0, color="gray", linewidth=0.8)
    axes.set(xscale="log", xlabel="tokens", ylabel="speed, in contiguous copies of as many bytes", ylim=(0, None))
    axes.legend()
    figure.tight_layout()
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 64, 512, 2048, 8192, 32768])
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("needs a CUDA device; --device cpu tries the script without one")
    torch.manual_seed(0)
    results = []
    print(f"{'operation':18} {'layout':6} {'tokens':>7} {'MiB':>8} {'us':>10} {'GB/s':>7} {'of copy':>8}")
    for num_tokens in options.tokens:
        for kv_layout in ("NHD", "HND"):
            for row in measure(kv_layout, num_tokens, options.device, options.rounds):
                results.append(row)
                print(
                    "{operation:18} {layout:6} {tokens:7} {MiB:8.2f} {us:10.1f} {GB/s:7.1f} {of copy:8.2f}".format(
                        **row
                    )
                )
    if options.plot:
        plot(results, options.plot)
    machine = torch.cuda.get_device_name() if options.device == "cuda" else platform.processor() or platform.machine()
    print(
        json.dumps(
            {"machine": machine, "threads": torch.get_num_threads(), "torch": torch.__version__, "results": results}
        )
    )


if __name__ == "__main__":
    main()
