"""Builds the programs of tests/reliability/native with the host compiler and a sanitizer: the core without Python.

    csrc/**/*.cpp, native/*.cpp ─► objects by what they are made of ─► programs by their objects      in build_cache

Nothing is built twice: a name is the digest of the source, the headers that it includes, the flags and the compiler.
"""

import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import build_cache

NATIVE = Path(__file__).parent / "native"
ROOT = Path(__file__).parents[2]
CSRC = ROOT / "csrc"
CACHE = build_cache.folder(otherwise=ROOT / ".pytest_cache" / "reliability")
BASE = ["base/copy_bytes", "base/token_view", "base/workers"]
CORE = [
    *BASE,
    "copy/copier/block_copier",
    "copy/host/host_copy",
    "copy/plan/copy_geometry",
    "copy/plan/copy_plan",
    "copy/plan/overlap",
    "copy/sm_kernel/kernel_on_host",
    "copy/sm_kernel/launch_plan",
    "sequences/sequence_commit",
    "sequences/sequence_growth",
    "sequences/sequence_inputs",
    "sequences/sequence_rows",
    "slots/slot_allocator",
    "slots/slot_tree",
    "slots/slot_tree_check",
    "pool/block_pool",
    "states/slot_pool",
    "pool/eviction/cost_policy",
    "pool/eviction/eviction_policies",
    "tree/eviction/ranked_order",
    "tree/nodes/child_table",
    "tree/nodes/sibling_index",
    "tree/prefix_tree",
    "tree/prefix_tree_check",
    "tree/prefix_tree_entries",
    "tree/prefix_tree_forget",
    "tree/prefix_tree_hottest",
    "tree/prefix_tree_insert",
    "tree/prefix_tree_log",
    "tree/prefix_tree_tiers",
    "tree/tree_log",
]
NUMERIC = [
    "attention/attention_kernel",
    "attention/attention_plan",
    "attention/paged_attention",
    "base/prefault",
    "chunks/stretch_copy",
    "chunks/stretch_reader",
    "chunks/stretch_writer",
    "codec/exponent_codec",
    "codec/exponent_kernel",
    "hash/xxh3",
    "hash/xxh3_constants",
    "hash/xxh3_kernel",
    "linear/linear",
    "linear/linear_kernel",
    "linear/norms/norm_kernel",
    "linear/norms/rms_norm",
    "linear/tile_check",
    "quantize/code_table",
    "quantize/quantize_kernel",
    "sampling/sample_rows",
    "sampling/sampling_kernel",
    "sampling/seen_tokens",
    "sampling/token_rules",
    "simd/instruction_sets",
    "simd/tile_permission",
    "simd/transpose_kernel",
    "tokens/kv_part",
]
FAMILIES = [
    "attention/attention_kernel",
    "codec/exponent_kernel",
    "hash/xxh3_kernel",
    "linear/linear_kernel",
    "linear/norms/norm_kernel",
    "quantize/quantize_kernel",
    "sampling/sampling_kernel",
    "simd/transpose_kernel",
]
TILES = [
    *BASE,
    "linear/linear",
    "linear/linear_kernel",
    "linear/tile_check",
    "simd/instruction_sets",
    "simd/tile_permission",
    "simd/transpose_kernel",
]
FLAGS = ["-std=c++20", "-O1", "-g1", "-fno-omit-frame-pointer", "-fno-math-errno", "-Wall", "-Wextra", "-pthread"]
# Of an instruction set: the bytes of a register, and what CMake defines. None of these needs a flag of the compiler.
SETS = {
    "base": (16, ""),
    "amx": (16, "#undef KVPAGE_TAKES_TILES\n#define KVPAGE_TAKES_TILES 1\n"),
    "amx_model": (64, "#define KVPAGE_MODELS_TILES 1\n"),
}
# The headers of the standard library that most files include: read once for each kind.
STANDARD = "".join(f"#include <{name}>\n" for name in ("algorithm", "memory", "optional", "span", "sstream", "vector"))
_LOCK = threading.Lock()
SANITIZERS = {"memory": "address,undefined", "threads": "thread", "behaviour": "undefined"}


def compiler() -> str:
    return os.environ.get("CXX", "g++")


@functools.cache
def missing() -> str | None:
    """Why nothing can be built here."""
    if shutil.which(compiler()) is None:
        return f"needs a C++ compiler, there is no {compiler()}"
    for library in ("libasan.so", "libubsan.so", "libtsan.so"):
        found = subprocess.run([compiler(), f"-print-file-name={library}"], capture_output=True, text=True).stdout
        if not Path(found.strip()).is_absolute():
            return f"needs a compiler with sanitizers, {compiler()} lacks {library}"
    return None


def build(name: str, sources: Iterable[str], kind: str, link_flags: Iterable[str] = ()) -> Path:
    """The program made of native/<source>.cpp and the core; kind: of SANITIZERS. Raises with what the compiler said."""
    return _program(name, _paths(CORE, sources), kind, link_flags)


def build_numeric(name: str, sources: Iterable[str], kind: str, link_flags: Iterable[str] = ()) -> Path:
    """native/<source>.cpp and all that computes, by the kernels for any machine: absent_kernels.cpp has the others."""
    kernels = [*(_kernel(family, "base") for family in FAMILIES), _kernel("linear/linear_kernel", "amx_model")]
    return _program(name, [*_paths([*BASE, *NUMERIC], [*sources, "absent_kernels"]), *kernels], kind, link_flags)


def _paths(parts: Iterable[str], sources: Iterable[str]) -> list[Path]:
    return [*(CSRC / f"{each}.cpp" for each in parts), *(NATIVE / f"{each}.cpp" for each in sources)]


def build_tiles(kind: str, options: Iterable[str] = ()) -> Path:
    """native/tiles.cpp with products by the tiles of AMX, and by their model.

    Without options the code for AMX is for any machine but for the tiles. With some it is compiled as they say.
    """
    sets = ("base", "amx_model", *(() if options else ("amx",)))
    kernels = [_kernel("simd/transpose_kernel", "base"), *(_kernel("linear/linear_kernel", each) for each in sets)]
    sources = ["allocations", "tiles", "tile_emulator", "absent_kernels"]
    others = [str(_object([*FLAGS, *options], _kernel("linear/linear_kernel", "amx", 64)))] if options else []
    return _program(f"tiles-{kind}", [*_paths(TILES, sources), *kernels], kind, others)


def _kernel(family: str, instruction_set: str, register_bytes: int = 0) -> Path:
    """The source that CMake makes of kernel.cpp.in for an instruction set, with its definition."""
    name, (least_bytes, definition) = Path(family).name, SETS[instruction_set]
    size = str(register_bytes or least_bytes)
    values = {"FAMILY": family, "SET": instruction_set, "REGISTER_BYTES": size, "NAME": name}
    source = definition + (CSRC / "simd" / "kernel.cpp.in").read_text()
    for key, value in values.items():
        source = source.replace(f"@KVPAGE_{key}@", value)
    path = CACHE / f"{name}_{instruction_set}-{_digest(source)}.cpp"
    return path if build_cache.note_use(path) else _written(path, source)


def _program(name: str, paths: Iterable[Path], kind: str, link_flags: Iterable[str]) -> Path:
    flags = [*FLAGS, f"-fsanitize={SANITIZERS[kind]}", *(["-fno-sanitize-recover=all"] if kind != "threads" else [])]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(functools.partial(_object, flags), paths))
    program = _made(
        CACHE / f"{name}-{_digest(*(each.name for each in objects), *link_flags)}",
        [*flags, *link_flags, *map(str, objects)],
    )
    build_cache.trim(CACHE)
    return program


def library(name: str) -> Path:
    """native/<name>.cpp as a shared library, to be loaded before a program."""
    flags, source = [*FLAGS, "-fPIC", "-shared"], NATIVE / f"{name}.cpp"
    digest = _digest(_version(), *flags, *(path.read_text() for path in build_cache.sources_of(source, [CSRC])))
    return _made(CACHE / f"{name}-{digest}.so", [*flags, str(source), "-ldl"])


def _object(flags: list[str], source: Path) -> Path:
    folders = [*(Path(flag[2:]) for flag in flags if flag.startswith("-I")), CSRC, NATIVE]
    texts = [path.read_text() for path in build_cache.sources_of(source, folders)]
    target = CACHE / f"{source.stem}-{_digest(_version(), STANDARD, *flags, *texts)}.o"
    if build_cache.note_use(target):
        return target
    options = [*flags, "-include", str(_standard(flags)), f"-I{CSRC}", f"-I{NATIVE}", f"-ffile-prefix-map={ROOT}=."]
    return _made(target, [*options, "-c", str(source)])


def _standard(flags: list[str]) -> Path:
    """A header of STANDARD, beside it what the compiler makes of it with these flags."""
    header = CACHE / f"standard-{_digest(_version(), STANDARD, *flags)}.h"
    with _LOCK:
        if not build_cache.note_use(header):
            _written(header, STANDARD)
        _made(header.with_suffix(".h.gch"), [*flags, "-x", "c++-header", str(header)])
    return header


def _written(path: Path, text: str) -> Path:
    """Whole or not there."""
    with tempfile.NamedTemporaryFile("w", dir=CACHE, delete=False) as made:
        made.write(text)
    return Path(made.name).replace(path)


def _made(target: Path, arguments: list[str]) -> Path:
    """Whole or not there: another process may build the same."""
    if build_cache.note_use(target):
        return target
    with tempfile.TemporaryDirectory(dir=CACHE) as place:
        made = Path(place) / "made"
        done = subprocess.run([compiler(), *arguments, "-o", str(made)], capture_output=True, text=True)
        if done.returncode != 0:
            raise RuntimeError(f"{target.name} was not built:\n{done.stderr}")
        made.replace(target)
    return target


@functools.cache
def _version() -> str:
    return subprocess.run([compiler(), "--version"], capture_output=True, text=True, check=True).stdout


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]
