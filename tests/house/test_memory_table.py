"""The table of context's memory in docs/notes/memory.md is that of the arithmetic."""

from pathlib import Path

import pytest
import transformers as tf
from support.memory_table import MODELS, table, table_of

PAGE = Path(__file__).resolve().parents[2] / "docs/notes/memory.md"


@pytest.mark.skipif(not hasattr(tf, "Qwen3NextConfig"), reason="this version of transformers lacks a type of the table")
def test_the_page_has_the_table() -> None:
    """`python tests/support/memory_table.py --write docs/notes/memory.md` writes it."""
    assert table_of(PAGE.read_text()) == table()


def test_windows_apart_hold_more() -> None:
    """By hand: 10 full layers of 62, with 16 KV heads of 128 elements, K and V, bf16; a window of 66 blocks."""
    memory, layer_bytes = MODELS["Gemma 3 27B"](), 2 * 16 * 128 * 2
    assert (memory.table_bytes, memory.token_bytes) == (62 * layer_bytes, 10 * layer_bytes)
    assert memory.sequence_bytes == 66 * 16 * 52 * layer_bytes
    assert (
        memory.num_tokens
        == (2**34 - 2**33 // (16 * 52 * layer_bytes) * 16 * 52 * layer_bytes) // (160 * layer_bytes) * 16
    )
    assert memory.num_tokens > 3 * memory.num_table_tokens
