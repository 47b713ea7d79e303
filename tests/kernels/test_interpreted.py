"""Each kernel by Triton's interpreter against the reference: a few cases, drawn by the seed of the day.

The slow tests `test_in_the_interpreter` run all cases.
"""

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
    "kernels/test_device_layers.py": ["test_norms_are", "test_a_layer_launches", "test_rotations", "test_activations"],
    "blend/test_mix_rows.py": ["test_from_anywhere_to_anywhere", "test_deviation"],
}


def test_each_kernel_is_the_reference(tmp_path):
    """Interpreted kernels cannot be compiled, so they get a process of their own, started elsewhere: a checkout in the
    current folder would hide the installed package."""
    pytest.importorskip("triton")
    names = [name for names in KERNELS.values() for name in names]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "", "--cases-each", "2"]
    command += ["-k", f"interpreter and ({' or '.join(names)})", *(str(TESTS / file) for file in KERNELS)]
    done = subprocess.run(
        command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert int(re.search(r"(\d+) passed", done.stdout)[1]) > len(names)
