"""Products of rows in groups, as of experts: against torch, expert by expert; a row's bits in every batch."""

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from kvpage import _C
from kvpage.ops.args.tokens import ROW_TYPES
from kvpage.ops.cpu import experts
from kvpage.ops.cpu.experts import grouped_linear

NUM_GROUPS, NUM_ROWS = 5, 40
SIZES = (1, 1), (16, 8), (33, 67), (520, 260)  # of a row, and columns
STEP = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
FORMS = {"a layer's": {}, "turned": {"is_turned": True}, "gated": {"activation": 1}}


def inputs(form: str, dtype: torch.dtype, size: int, num_columns: int, has_bias: bool) -> dict[str, Any]:
    draw = torch.Generator().manual_seed(size)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=draw).to(dtype)

    is_turned = form == "turned"
    shape = (NUM_GROUPS, size, num_columns) if is_turned else (NUM_GROUPS, num_columns, size)
    return {
        "x": random(NUM_ROWS, size),
        "weight": random(*shape) / size**0.5,
        "bias": random(NUM_GROUPS, num_columns) if has_bias and form != "gated" else None,
        "up": random(*shape) / size**0.5 if form == "gated" else None,
        **FORMS[form],
    }


def naive(args: dict[str, Any], row: int, group: int) -> torch.Tensor:
    """One row of the result, in fp64."""
    x, weight = args["x"][row].double(), args["weight"][group].double()
    product = x @ weight if args.get("is_turned") else weight @ x
    if args["up"] is not None:
        return F.silu(product) * (args["up"][group].double() @ x)
    return product if args["bias"] is None else product + args["bias"][group].double()


@pytest.fixture(params=_C.turned_kernels())
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    class Core:
        @staticmethod
        def grouped_linear(*args: Any) -> None:
            _C.grouped_linear(*args, kernel=request.param)

    monkeypatch.setattr(experts, "_C", Core)
    return request.param


@pytest.mark.parametrize("dtype", tuple(ROW_TYPES), ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_every_size_equals_the_products_of_experts(kernel: str, form: str, dtype: torch.dtype) -> None:
    ends = np.array([2, 2, 30, 31, 60])
    rows = np.random.default_rng(0).integers(0, NUM_ROWS, 60)
    groups = np.searchsorted(ends, np.arange(60), "right")
    for size, num_columns in SIZES:
        args = inputs(form, dtype, size, num_columns, has_bias=size > 1)
        found = grouped_linear(rows=rows, ends=ends, **args, num_threads=2)
        expected = torch.stack([naive(args, row, group) for row, group in zip(rows, groups, strict=True)])
        assert ((found.double() - expected).abs() <= STEP[dtype] * (1 + expected.abs())).all()


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_a_row_has_the_same_bits_in_every_batch(kernel: str, form: str, dtype: torch.dtype) -> None:
    args = inputs(form, dtype, 521, 300, has_bias=True)
    alone = [
        grouped_linear(rows=np.array([row]), ends=np.array([0, 0, 1, 1, 1]), **args, num_threads=1)
        for row in range(NUM_ROWS)
    ]
    for first, last in ((0, 2), (0, 24), (3, 28), (0, NUM_ROWS)):
        rows = np.arange(first, last)
        found = grouped_linear(
            rows=np.r_[0, rows, 1],
            ends=np.array([0, 1, 1 + len(rows), 2 + len(rows), 2 + len(rows)]),
            **args,
            num_threads=4,
        )
        assert torch.equal(found[1:-1], torch.cat(alone[first:last]))


def test_nothing_and_wrong_arguments() -> None:
    args = inputs("turned", torch.float32, 16, 8, has_bias=True)
    none = np.array([], np.int64)
    assert grouped_linear(rows=none, ends=np.zeros(NUM_GROUPS, np.int64), **args, num_threads=1).shape == (0, 8)
    one = np.array([0])
    for rows, ends, words in (
        (one, np.array([0, 0, 0, 0, 2]), "ends must be those of 5 groups and 1 rows"),
        (one, np.array([0, 0, 2, 0, 1]), "ends must ascend"),
        (np.array([NUM_ROWS]), np.array([0, 0, 0, 0, 1]), r"rows must be in \[0, 40\), got 40"),
        (np.array([-1]), np.array([0, 0, 0, 0, 1]), r"rows must be in \[0, 40\), got -1"),
    ):
        with pytest.raises(ValueError, match=words):
            grouped_linear(rows=rows, ends=ends, **args, num_threads=1)
    with pytest.raises(ValueError, match="x must be of fp32, bf16 or fp16"):
        grouped_linear(rows=one, ends=np.array([0, 0, 0, 0, 1]), **{**args, "x": args["x"].double()}, num_threads=1)


@pytest.mark.parametrize(
    "options",
    [
        {"activation": 1},
        {"up": torch.zeros(2, 6, 8)},
        {"activation": 1, "up": torch.zeros(2, 6, 8), "bias": torch.zeros(2, 6)},
    ],
)
def test_an_activation_comes_with_up_and_nothing_else(options: dict[str, Any]) -> None:
    rows, ends = np.arange(4), np.array([2, 4])
    with pytest.raises(ValueError, match="up must come with an activation"):
        grouped_linear(torch.zeros(4, 8), rows, ends, torch.zeros(2, 6, 8), num_threads=1, **options)
