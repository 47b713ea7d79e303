"""Rotations of a view's attention: the numbers of the model's own function, wherever that is what the model computes.

The oracle is the model's own function, or its attention, with the same arguments.
"""

import inspect

import pytest
import torch
from support.models import make_model
from torch import nn
from transformers.models.llama import modeling_llama
from transformers.models.phi3 import modeling_phi3

from kvpage.serving.model.native import rotary
from kvpage.serving.model.native.layers import NativeLayers
from kvpage.serving.model.native.plain import is_plain_call
from kvpage.serving.model.native.rotary import NAME, RotaryForward, RotaryKinds, host_rope, rotated
from kvpage.serving.model.view import ModelView

TOLERANCES = {torch.float32: 1e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}


def heads(num_heads: int, num_tokens: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    """Rows as models hand them over: [1, heads, tokens, size], a token's heads side by side in memory."""
    generator = torch.Generator().manual_seed(num_heads)
    return torch.randn(1, num_tokens, num_heads, size, generator=generator).to(dtype).transpose(1, 2)


def angles(num_tokens: int, size: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    numbers = torch.randn(2, num_tokens, size, generator=torch.Generator().manual_seed(9)).to(dtype)
    return numbers[:1], numbers[1:]


@pytest.mark.parametrize("num_tokens", [0, 1, 2, 17])
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_the_rotation(dtype: torch.dtype, num_tokens: int) -> None:
    query, key = heads(4, num_tokens, 8, dtype), heads(2, num_tokens, 8, dtype)
    cos, sin = angles(num_tokens, 8, dtype)
    expected = modeling_llama.apply_rotary_pos_emb(query, key, cos, sin)
    for rows, own in zip((query, key), expected, strict=True):
        before = rows.clone()
        found = rotated(rows, cos.unsqueeze(1), sin.unsqueeze(1))
        assert torch.equal(rows, before) and found.dtype == dtype
        assert num_tokens < 2 or found.stride() == own.stride()
        tolerance = TOLERANCES[dtype]
        torch.testing.assert_close(found, own, rtol=tolerance, atol=4 * tolerance)


def rotating_of(kind: type[nn.Module]) -> object:
    """The function by which a copy's forward rotates."""
    rotating = RotaryKinds(is_plain_call, host_rope).rotating_of(kind.forward)
    assert rotating is not None
    return inspect.unwrap(rotating.forward).__globals__[NAME]


@pytest.mark.parametrize("width", [8, 6])
def test_narrower_angles_are_the_models_own_function(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some models rotate a part of each head."""
    calls: list[int] = []
    monkeypatch.setattr(rotary, "rotated", lambda *given: calls.append(1) or rotated(*given))
    rotate = rotating_of(modeling_phi3.Phi3Attention)
    query, key = heads(4, 5, 8, torch.float32), heads(2, 5, 8, torch.float32)
    given = query, key, *angles(5, width, torch.float32)
    calls.clear()
    with torch.no_grad():
        found = rotate(*given)
    for one, own in zip(found, modeling_phi3.apply_rotary_pos_emb(*given), strict=True):
        torch.testing.assert_close(one, own)
    assert len(calls) == (2 if width == 8 else 0)


def test_wider_numbers_and_gradients_are_the_models_own_function() -> None:
    rotate = rotating_of(modeling_llama.LlamaAttention)
    query, key = heads(4, 5, 8, torch.bfloat16), heads(2, 5, 8, torch.bfloat16)
    with torch.no_grad():
        found, _ = rotate(query, key, *angles(5, 8, torch.float32))
    assert found.dtype == torch.float32
    query.requires_grad_()
    rotate(query, key, *angles(5, 8, torch.bfloat16))[0].sum().backward()
    assert query.grad is not None


def test_a_function_that_the_models_file_gets_later_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    rotate, given = rotating_of(modeling_llama.LlamaAttention), (heads(4, 5, 8, torch.float32),) * 2
    monkeypatch.setattr(modeling_llama, NAME, lambda query, key, cos, sin: "patched")
    with torch.no_grad():
        assert rotate(*given, *angles(5, 8, torch.float32)) == "patched"


@pytest.mark.parametrize("other", [lambda q, k, cos, sin: (q * cos[:, None], k), lambda q, cos, sin: q, None])
def test_functions_that_compute_something_else(other: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modeling_llama, NAME, other)
    view = ModelView(make_model("llama"), NativeLayers()).module
    assert "forward" not in vars(view.model.layers[0].self_attn)


def test_a_forward_that_the_class_gets_later_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    view = ModelView(make_model("llama"), NativeLayers()).module
    attention = view.model.layers[0].self_attn
    assert type(attention.forward) is RotaryForward
    monkeypatch.setattr(modeling_llama.LlamaAttention, "forward", lambda self, *args: (self, args))
    assert attention(7) == (attention, (7,))


def test_the_models_own_attention_is_as_it_was() -> None:
    model = make_model("llama")
    own = modeling_llama.apply_rotary_pos_emb
    attention = ModelView(model, NativeLayers()).module.model.layers[0].self_attn
    assert modeling_llama.apply_rotary_pos_emb is own and "forward" not in vars(model.model.layers[0].self_attn)
    assert attention.forward._own is modeling_llama.LlamaAttention.forward
