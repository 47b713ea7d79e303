"""A dry run: each part is tried by something small, on a machine without a device.

The benchmarks run over a device that is this machine's CPU (kvpage.benchmarks.fake_cuda). What they measure means
nothing. Each part leaves its log, its plot and its line of JSON, as on a device.
"""

from dataclasses import replace

from .part import Part
from .plan import SMOKE, pytest, python

SECONDS = 600.0
"""Of each part: the machine may be busy."""
FAKE = ("-m", "kvpage.benchmarks.fake_cuda")
FAKED = (
    "bench_paged_attention",
    "bench_swap",
    "bench_reshape_gather",
    "bench_blend_ops",
    "bench_shared_prefix",
    "bench_same_bits_gpu",
    "flashinfer",
)
TINY = ("--sizes", "tiny", "--rounds", "1", "--seconds", "1")
SMALL: dict[str, tuple[str, ...]] = {
    "versions": ("--without-device",),
    "build": ("--dry-run",),
    "compile": ("--processes", "1", "--capability", "90", "--only", "blend rows"),
    "bench_paged_attention": TINY,
    "bench_serving_gpu": (
        *("--device", "cpu", "--shape", "tiny", "--batches", "2", "--context", "8", "--requests", "2"),
        *("--prompt-tokens", "8", "--tokens", "2", "--rounds", "1", "--without", "generate_batch"),
    ),
    "bench_swap": TINY,
    "bench_reshape_gather": ("--tokens", "16", "--chunk-tokens", "16", "--rounds", "1", "--seconds", "0"),
    "bench_blend_ops": ("--layers", "3", "--tokens", "64", "--rounds", "1", "--seconds", "0"),
    "bench_shared_prefix": ("--seqs", "2", "--shared", "33", "--own", "5", "--rounds", "1"),
    "bench_same_bits_gpu": ("--rows", "1", "3", "--size", "32", "--vocab", "50", "--keys", "40", "--rounds", "1"),
    "demo": ("--device", "cpu", "--requests", "4", "--turns", "1", "--max-tokens", "4", "--sample", "1"),
    "flashinfer": TINY,
}
"""Arguments that are added to a command: of an option that comes twice the last one counts."""
OTHERS: dict[str, tuple[str, ...]] = {
    "smoke": pytest("-k", "cpu", SMOKE),
    "calibrate": python("-m", "kvpage", "info"),
    "tests": pytest("--collect-only", SMOKE),
    "grid": pytest("--collect-only", SMOKE),
}
"""Commands in place of those that ask for a device by more than an option."""


def dry(part: Part) -> Part:
    """Return the part's small counterpart."""
    program, *arguments = part.command
    command = (program, *(FAKE if part.name in FAKED else ()), *arguments, *SMALL.get(part.name, ()))
    return replace(part, seconds=SECONDS, command=OTHERS.get(part.name, command))
