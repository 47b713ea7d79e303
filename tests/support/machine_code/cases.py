"""Kernels whose machine code is held against docs/notes/machine_code.md. A new kernel is one line more in CASES."""

import importlib.util
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from support.machine_code.cost import Cost
from support.machine_code.machine_code import MachineCode

ROOT = Path(__file__).parents[3]
ARCHS = (80, 90)
BF16, E4M3, E5M2, INT8 = torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.int8
Measure = Callable[[int], Cost]


def compile_tests(name: str) -> ModuleType:
    """Return the tests that compile kernels ahead of time, of tests/kernels."""
    path = ROOT / "tests" / "kernels" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"machine_code_{name}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def measured(compiled: Any, arch: int, loop: str | None = None) -> Cost:
    """Return the cost of a loop that has such an instruction, or of the whole kernel where none is named."""
    found = MachineCode.of(compiled.asm["cubin"])
    lines = found.path() if loop is None else found.loop(loop)
    return Cost.of(lines, found.registers, compiled.metadata.shared, compiled.metadata.num_warps, arch)


def rows(kernel: str, dtype: torch.dtype, arch: int) -> Cost:
    tests = compile_tests("test_triton_compile")
    return measured(tests.compile_kernel(kernel, arch, tests.make_layout("flash", dtype), BF16), arch)


def mix(arch: int) -> Cost:
    return measured(compile_tests("test_blend_compile").compile_mix("llama", arch, BF16, "all"), arch)


def deviation(arch: int) -> Cost:
    tests = compile_tests("test_blend_compile")
    constants = tests.deviation_constants(8, 128, BF16)
    return measured(tests.compiled_of(tests.row_deviation_kernel, arch, constants, BF16, {}), arch)


def layer(kernel: str, arch: int) -> Cost:
    return measured(compile_tests("test_layer_compile").compile_layer(kernel, BF16, arch), arch)


def attention(name: str, arch: int) -> Cost:
    """The loop over tiles of keys, where no key is masked out."""
    from support.attention_compiled import CASES as ATTENTION
    from support.attention_compiled import compile_attention

    return measured(compile_attention(arch, **ATTENTION[name]), arch, "HMMA|HGMMA")


def sampling(kernel: str, dtype: torch.dtype, arch: int) -> Cost:
    """All instructions of the kernel, each once: of `choose`, those of every way to choose."""
    tests = compile_tests("test_sampling_compile")
    return measured(tests.compiled_of(getattr(tests, f"{kernel}_kernel"), arch, dtype), arch)


def copy(vector: str, arch: int) -> Cost:
    """The loop over units of the kernel that copies blocks, as nvcc compiles it."""
    source = ROOT / "csrc" / "copy" / "sm_kernel" / "sm_kernel.cu"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        command = ["nvcc", "-std=c++20", "-O3", f"-I{ROOT / 'csrc'}", f"-arch=sm_{arch}", "-cubin", source]
        subprocess.run([*command, "-o", file.name], check=True)
        found = MachineCode.of(Path(file.name).read_bytes(), f"copy_inlineI{vector}Ll8128E")
    return Cost.of(found.loop("LDG"), found.registers, 0, 8, arch)


@dataclass(frozen=True, slots=True)
class Case:
    """unit: what the counted instructions move. program: needed besides Triton; None for nothing."""

    unit: str
    measure: Measure
    program: str | None = None

    @property
    def can_run(self) -> bool:
        return self.program is None or shutil.which(self.program) is not None


CASES = {
    "reshape bf16": Case("a tile", partial(rows, "reshape", BF16)),
    "reshape e4m3": Case("a tile", partial(rows, "reshape", E4M3)),
    "reshape int8": Case("a tile", partial(rows, "reshape", INT8)),
    "gather bf16": Case("a tile", partial(rows, "gather packed", BF16)),
    "gather e4m3": Case("a tile", partial(rows, "gather packed", E4M3)),
    "gather int8": Case("a tile", partial(rows, "gather packed", INT8)),
    "store chunk bf16": Case("a tile", partial(rows, "store chunk", BF16)),
    "store chunk e4m3": Case("a tile", partial(rows, "store chunk", E4M3)),
    "load chunk bf16": Case("a tile", partial(rows, "load chunk", BF16)),
    "load chunk e4m3": Case("a tile", partial(rows, "load chunk", E4M3)),
    "mix rows bf16": Case("a tile", mix),
    "deviation bf16": Case("a tile", deviation),
    "norm bf16": Case("a tile", partial(layer, "norm")),
    "gate bf16": Case("a tile", partial(layer, "gate")),
    "rope bf16": Case("a tile", partial(layer, "rope")),
    "sum and norm bf16": Case("a tile", partial(layer, "sum, norm")),
    "heads bf16": Case("a tile", partial(layer, "heads")),
    "decode bf16": Case("a tile of keys", partial(attention, "decode")),
    "decode e4m3": Case("a tile of keys", partial(attention, "decode e4m3")),
    "decode int8": Case("a tile of keys", partial(attention, "decode int8")),
    "decode latents, 16 heads": Case("a tile of keys", partial(attention, "decode mla, 16 heads")),
    "decode latents, 128 heads": Case("a tile of keys", partial(attention, "decode mla")),
    "shared keys bf16": Case("a tile of keys", partial(attention, "shared keys")),
    "shared keys e4m3": Case("a tile of keys", partial(attention, "shared keys e4m3")),
    "prefill bf16": Case("a tile of keys", partial(attention, "prefill")),
    "prefill e4m3": Case("a tile of keys", partial(attention, "prefill e4m3")),
    "survey logits fp32": Case("1,024 logits", partial(sampling, "survey", torch.float32)),
    "survey logits bf16": Case("1,024 logits", partial(sampling, "survey", BF16)),
    "choose tokens fp32": Case("the kernel", partial(sampling, "choose", torch.float32)),
    "choose tokens bf16": Case("the kernel", partial(sampling, "choose", BF16)),
    "copy blocks, 16 bytes a thread": Case("2 KiB", partial(copy, "NS_8Vector16E"), "nvcc"),
    "copy blocks, 1 byte a thread": Case("128 bytes", partial(copy, "h"), "nvcc"),
}
