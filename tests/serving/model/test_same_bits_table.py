"""The table of docs/same_bits.md, type by type."""

from pathlib import Path

import pytest
import transformers as tf
from support.family_configs import decoder_types
from support.same_bits_table import verdict, written

PAGE = Path(__file__).parents[3] / "docs/same_bits.md"
WRITTEN = written(PAGE)


@pytest.mark.skipif(f"transformers {tf.__version__}" not in PAGE.read_text(), reason="the table is of another version")
@pytest.mark.parametrize("kind", [kind for kind in decoder_types() if kind in WRITTEN])
def test_a_type(kind: str) -> None:
    assert verdict(kind) == WRITTEN[kind]


def test_the_page_names_types_of_each_verdict() -> None:
    assert {"llama", "mixtral", "mamba2", "deepseek_v2"} <= WRITTEN.keys()
    assert set(WRITTEN.values()) == {"the same bits", "refused: a step of its own", "refused: aten::polar"}
