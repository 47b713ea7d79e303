"""Each kernel by Triton's interpreter against the reference: a few cases, drawn by the seed of the day; slowly, all."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
KERNELS = {
    "kernels/test_triton_layouts.py": ["test_rows_are_written", "test_rows_are_read"],
    "kernels/test_triton_lengths.py": ["test_many_sequences_are_told_apart"],
    "kernels/test_triton_chunks.py": ["test_chunks_are_stored_and_loaded_as"],
    "kernels/test_triton_attention.py": ["test_any_number_of_queries", "test_long_sequences_are_split_and_merged"],
    "kernels/test_sampling_kernels.py": ["test_tokens_are_those_of_the_cpu"],
    "kernels/test_layers_in_the_interpreter.py": [
        "test_norms_are",
        "test_a_layer_launches",
        "test_rotations",
        "test_activations",
    ],
    "blend/test_mix_rows.py": ["test_from_anywhere_to_anywhere", "test_deviation"],
}


ALL_CASES = {  # files, and how many cases they have at least
    "rows": (
        ("ops/test_reshape.py", "ops/test_gather.py", "ops/test_rows_on_devices.py", "kernels/test_triton_layouts.py",
         "kernels/test_triton_numbers.py", "kernels/test_triton_chunks.py", "kernels/test_triton_lengths.py"),
        400,
    ),
    "attention": (
        ("kernels/test_triton_attention.py", "kernels/test_attention_items.py", "kernels/test_attention_numbers.py",
         "kernels/test_attention_lengths.py", "kernels/test_attention_positions.py",
         "kernels/test_shared_attention.py"),
        200,
    ),
    "blending": (("blend/test_mix_rows.py",), 100),
    "layers": (("kernels/test_layers_in_the_interpreter.py",), 55),
    "sampling": (("kernels/test_sampling_kernels.py",), 17),
}  # fmt: skip


def num_passed(folder, *arguments):
    """Interpreted kernels cannot be compiled, so they get a process of their own, started elsewhere: a checkout in the
    current folder would hide the installed package."""
    pytest.importorskip("triton")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "", *arguments]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return int(re.search(r"(\d+) passed", done.stdout)[1])


def test_each_kernel_is_the_reference(tmp_path):
    names = [name for names in KERNELS.values() for name in names]
    files = [TESTS / file for file in KERNELS]
    assert num_passed(tmp_path, "--cases-each", "2", "-k", f"interpreter and ({' or '.join(names)})", *files) > len(
        names
    )


@pytest.mark.parametrize("kind", ALL_CASES)
def test_all_cases(tmp_path, kind):
    files, least = ALL_CASES[kind]
    assert num_passed(tmp_path, "-k", "interpreter", *(TESTS / file for file in files)) >= least


def test_families(tmp_path):
    assert num_passed(tmp_path, TESTS / "kernels/test_layers_of_families.py") >= 190
