"""The long form: lives of every type of docs/same_bits.md, in fp32 and bf16."""

import random
from pathlib import Path

import pytest
import torch
from support.family import make_family_model
from support.family_configs import decoder_types
from support.same_bits import check_life
from support.same_bits_table import HOLDS, written
from support.seeds import seed_of

PAGE = Path(__file__).parents[2] / "docs/same_bits.md"
KINDS = [kind for kind, verdict in written(PAGE).items() if verdict == HOLDS and kind in decoder_types()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_lives(tmp_path: Path, kind: str, dtype: torch.dtype) -> None:
    model = make_family_model(kind).to(dtype)
    for number in range(3):
        check_life(model, random.Random(seed_of(number)), tmp_path / str(number), num_requests=5)
