"""Loads and stores by threads can fill the memory of an H200: the arithmetic of docs/notes/machine_code.md."""

from pathlib import Path

import pytest

pytest.importorskip("triton")

from support.machine_code.table import read_table  # noqa: E402

_, TABLE = read_table((Path(__file__).parents[2] / "docs" / "notes" / "machine_code.md").read_text())
MULTIPROCESSORS, CLOCK, SCHEDULERS, BANDWIDTH, LATENCY = 132, 1.755e9, 4, 4.8e12, 0.8e-6
WARPS, TILE_BYTES, LOADED_BYTES = 4, 16 * 1024, 2 * 32 * 16  # of a program; both ways; of a warp at once
SEARCH = 25  # instructions of a step of the search for a token's sequence


@pytest.mark.parametrize("name, searches", [("gather bf16", 7), ("store chunk bf16", 0), ("load chunk bf16", 0)])
def test_neither_instructions_nor_bytes_under_way_are_short(name, searches):
    """Else bulk copies, which need no registers and few instructions, would be faster."""
    cost = TABLE[name, 90]
    under_way = BANDWIDTH / 2 * LATENCY / MULTIPROCESSORS
    assert cost.warps * LOADED_BYTES >= 4 * under_way
    issued = TILE_BYTES / BANDWIDTH * MULTIPROCESSORS * CLOCK * SCHEDULERS / WARPS
    assert cost.instructions + SEARCH * searches <= 0.9 * issued
