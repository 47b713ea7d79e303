"""Linear recurrences: the C++ core against a loop over tokens in fp64; a token's bits in every portion."""

import itertools
from typing import Any

import pytest
import torch

from kvpage import _C
from kvpage.ops.cpu import recurrence as module
from kvpage.ops.cpu.recurrence import recurrence

FORMS = {
    "delta rule": {"decays": "head", "corrects": True},
    "delta rule, decays of keys": {"decays": "key", "corrects": True},
    "heads of Mamba-2": {"decays": "head", "corrects": False},
    "channels of Mamba": {"decays": "element", "corrects": False},
}
SIZES = (1, 1), (4, 7), (16, 64), (17, 65), (33, 130)  # keys and columns
NUM_TOKENS = 9


def inputs(form: str, num_keys: int, num_columns: int, heads: tuple[int, int] = (2, 4)) -> dict[str, Any]:
    """Arguments for two sequences. heads: of keys, and of values."""
    draw = torch.Generator().manual_seed(num_keys * 1000 + num_columns)
    rows = 2, NUM_TOKENS

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*rows, *shape, generator=draw)

    kind, corrects = FORMS[form]["decays"], FORMS[form]["corrects"]
    sizes = {"head": (heads[1],), "key": (heads[1], num_keys), "element": (heads[1], num_columns)}[kind]
    rates = torch.rand(heads[1], num_keys, num_columns, generator=draw)
    return {
        "query": random(heads[0], num_keys),
        "key": random(heads[0], num_keys) / num_keys**0.5,
        "value": random(heads[1], num_columns),
        "decay": -random(*sizes).abs(),
        "state": torch.randn(2, heads[1], num_keys, num_columns, generator=draw),
        "factor": random(heads[1]).sigmoid() if corrects else None,
        "rates": rates if kind == "element" else None,
    }


def naive(args: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """The outputs and the states, in fp64."""
    args = {name: part if part is None else part.double() for name, part in args.items()}
    repeats = args["value"].shape[2] // args["query"].shape[2]
    query, key = (args[name].repeat_interleave(repeats, 2)[..., None] for name in ("query", "key"))
    state, outputs = args["state"].clone(), []
    for token in range(NUM_TOKENS):
        decay = args["decay"][:, token]
        power = decay[..., None, None] if decay.dim() == 2 else decay[..., None]
        if args["rates"] is not None:
            power = decay[..., None, :] * args["rates"]
        state = state * power.exp()
        added = args["value"][:, token]
        if args["factor"] is not None:
            added = (added - (state * key[:, token]).sum(2)) * args["factor"][:, token, :, None]
        state = state + key[:, token] * added[..., None, :]
        outputs.append((state * query[:, token]).sum(2))
    return torch.stack(outputs, 1), state


def part(args: dict[str, Any], tokens: slice, sequences: slice = slice(None)) -> dict[str, Any]:
    """The arguments of some tokens and sequences. The state is shared."""
    whole = {"state": args["state"][sequences], "rates": args["rates"]}
    rest = {name: value for name, value in args.items() if name not in whole}
    return whole | {name: value if value is None else value[sequences, tokens] for name, value in rest.items()}


@pytest.fixture(params=_C.recurrence_kernels())
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    class Core:
        @staticmethod
        def recurrence(*args: Any) -> None:
            _C.recurrence(*args, kernel=request.param)

    monkeypatch.setattr(module, "_C", Core)
    return request.param


@pytest.mark.parametrize("form", FORMS)
def test_every_size_equals_the_loop(kernel: str, form: str) -> None:
    for num_keys, num_columns in SIZES:
        args = inputs(form, num_keys, num_columns)
        expected, last = naive(args)
        found = recurrence(**args, num_threads=2)
        torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(args["state"].double(), last, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("form", FORMS)
def test_a_token_has_the_same_bits_in_every_portion_and_batch(kernel: str, form: str) -> None:
    args = inputs(form, 17, 70)
    whole = {**args, "state": args["state"].clone()}
    expected = recurrence(**whole, num_threads=1)
    for ends in ([0, 1, 9], [0, 4, 5, 9], list(range(10))):
        for sequences in (slice(None), slice(0, 1), slice(1, 2)):
            mine = {**args, "state": args["state"].clone()}
            cuts = [part(mine, slice(*cut), sequences) for cut in itertools.pairwise(ends)]
            outputs = torch.cat([recurrence(**cut, num_threads=4) for cut in cuts], 1)
            assert torch.equal(outputs, expected[sequences])
            assert torch.equal(mine["state"][sequences], whole["state"][sequences])


def test_states_of_any_strides_are_changed_where_they_lie() -> None:
    args = inputs("heads of Mamba-2", 5, 66)
    expected, last = naive(args)
    slots = torch.full((3, 4, 66, 9), 7.0)  # [slot, head, column, key], wider than the state
    state = slots[:2, :, :, 2:7].transpose(2, 3)
    state.copy_(args["state"])
    args["state"] = state
    torch.testing.assert_close(recurrence(**args, num_threads=1).double(), expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(state.double(), last, rtol=1e-4, atol=1e-4)
    assert (slots[2] == 7).all() and (slots[..., :2] == 7).all() and (slots[..., 7:] == 7).all()


def test_no_tokens_and_no_sequences() -> None:
    args = inputs("delta rule", 4, 7)
    before = args["state"].clone()
    assert recurrence(**part(args, slice(0, 0)), num_threads=1).shape == (2, 0, 4, 7)
    assert recurrence(**part(args, slice(0, 0), slice(0, 0)), num_threads=1).shape == (0, 0, 4, 7)
    assert torch.equal(args["state"], before)


@pytest.mark.parametrize("name", ["key", "value", "decay", "state", "factor", "rates"])
def test_wrong_arguments_are_refused(name: str) -> None:
    args = inputs("delta rule" if name == "factor" else "channels of Mamba", 4, 7)
    before = args["state"].clone()
    for wrong in (args[name].double(), args[name][..., :-1], args[name].to("meta")):
        with pytest.raises(ValueError, match=r" must be "):
            recurrence(**{**args, name: wrong}, num_threads=1)
    assert torch.equal(args["state"], before)


def test_heads_that_share_no_key_are_refused() -> None:
    with pytest.raises(ValueError, match="num_heads must be a multiple of num_key_heads, got 3 and 2"):
        recurrence(**inputs("delta rule", 4, 7, heads=(2, 3)), num_threads=1)


def test_torchs_default_dtype_does_not_count() -> None:
    query, state = torch.rand(1, 33, 2, 8), torch.zeros(1, 2, 8, 40)
    value, decay = torch.rand(1, 33, 2, 40), -torch.rand(1, 33, 2)
    expected = recurrence(query, query, value, decay, state.clone(), num_threads=1)
    torch.set_default_dtype(torch.bfloat16)
    try:
        out = recurrence(query, query, value, decay, state, num_threads=1)
    finally:
        torch.set_default_dtype(torch.float32)
    assert out.dtype == torch.float32 and torch.equal(out, expected)
