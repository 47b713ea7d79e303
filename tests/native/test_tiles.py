"""Products by tiles of AMX, where no processor has them: their machine code under an emulator, and looked at."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import native_build
import pytest
from support.seeds import todays_seed

import kvpage._C as _C

ROOT = Path(__file__).parents[2]
FLAGS = ["-O3", "-DNDEBUG", "-std=c++20", "-fPIC", "-fno-math-errno"]
pytestmark = pytest.mark.skipif(native_build.missing() is not None, reason=str(native_build.missing()))


def options_of_cmake() -> list[str]:
    """The flags with which CMake compiles the set "amx", and those of the sets that it names."""
    named = dict(re.findall(r"set\(KVPAGE_OPTIONS_(\w+) ([^)]*)\)", (ROOT / "CMakeLists.txt").read_text()))

    def flags(name: str) -> list[str]:
        words = named[name].split()
        return [flag for word in words for flag in (flags(word[17:-1]) if word.startswith("${") else [word])]

    return flags("amx")


def blocks_of(code: str) -> dict[str, list[str]]:
    """The instructions of each form of add_block, by its two constants."""
    found = re.findall(r"<void .*::add_block<(\w+, \w+), .*>:\n((?:.+\n)+)", code)
    return {name: [line.split("\t")[-1].strip() for line in body.splitlines()] for name, body in found}


def innermost(lines: list[str]) -> list[str]:
    """The instructions from the first tile of w to the jump back."""
    first = next(i for i, line in enumerate(lines) if re.match(r"tileloadd .*%tmm4", line))
    last = max(i for i, line in enumerate(lines) if line.startswith("tdpbf16ps"))
    return lines[first : last + 1]


@pytest.fixture(scope="module")
def code(tmp_path_factory) -> str:
    """The kernel as it is shipped, in the words of objdump."""
    if shutil.which("objdump") is None:
        pytest.skip("needs objdump")
    folder = tmp_path_factory.mktemp("amx")
    source = (ROOT / "csrc/simd/kernel.cpp.in").read_text()
    for key, value in {"FAMILY": "linear/linear_kernel", "SET": "amx", "REGISTER_BYTES": "64"}.items():
        source = source.replace(f"@KVPAGE_{key}@", value)
    (folder / "amx.cpp").write_text(source.replace("@KVPAGE_NAME@", "linear_kernel"))
    options = [*FLAGS, *options_of_cmake(), f"-I{ROOT / 'csrc'}", "-c", "amx.cpp", "-o", "amx.o"]
    done = subprocess.run([native_build.compiler(), *options], cwd=folder, capture_output=True, text=True)
    if "unrecognized" in done.stderr:
        pytest.skip("needs a compiler that knows AMX")
    assert done.returncode == 0, done.stderr
    printed = ["objdump", "-d", "-C", "--no-show-raw-insn", "amx.o"]
    return subprocess.run(printed, cwd=folder, capture_output=True, text=True, check=True).stdout


def test_a_block_keeps_its_sums_in_registers(code):
    """Between the products only w and x are loaded, each once a step, and nothing is stored or zeroed."""
    blocks = blocks_of(code)
    assert len(blocks) == 4
    for name, lines in blocks.items():
        num_tiles = 2 if name.startswith("true") else 1
        steps = [line.split()[0] for line in innermost(lines)]
        assert steps.count("tdpbf16ps") == 2 * num_tiles and steps.count("tileloadd") == 2 + num_tiles, name
        assert not {"tilestored", "tilezero", "ldtilecfg"} & set(steps), name
        assert any("prefetcht0" in line for line in lines) == name.endswith("true"), name


def test_each_sum_is_of_its_own_tiles(code):
    wide = blocks_of(code)["true, false"]
    products = [re.findall(r"%tmm(\d)", line) for line in wide if line.startswith("tdpbf16ps")]
    assert sorted(map(tuple, products)) == [("6", "4", "0"), ("6", "5", "2"), ("7", "4", "1"), ("7", "5", "3")]


def test_tiles_are_released(code):
    assert "tilerelease" in code and "ldtilecfg" in code


def run_emulated(program: Path) -> None:
    """Bit by bit as the model, for random sizes and threads; and the verdict on processors of four arithmetics."""
    done = subprocess.run([program, str(todays_seed()), "60"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    assert figures["products"] > 1000 and figures["releases"] > 0


@pytest.mark.parametrize("kind", ["memory", "threads"])
def test_products_under_an_emulator(kind):
    run_emulated(native_build.build_tiles(kind))


@pytest.mark.skipif("avx512bf16" not in _C.linear_kernels(), reason="needs AVX512_BF16")
def test_the_shipped_code_under_an_emulator():
    run_emulated(native_build.build_tiles("memory", [*FLAGS, *options_of_cmake()]))
