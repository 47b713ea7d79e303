"""Which forwards of layers and of attention are known by a trial, and which are left alone."""

import inspect
import textwrap

import pytest
import torch
import transformers as tf
from torch import nn
from transformers.models.llama import modeling_llama
from transformers.models.olmo import modeling_olmo

from kvpage.serving.model.native.head_shape import head_shape_of
from kvpage.serving.model.native.layer_shape import LayerShape, shape_of


class Layer(nn.Module):
    """Llama's, with places for what others do differently."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.mixer, self.second, self.mlp = (nn.Identity() for _ in range(4))

    def forward(self, rows, mask=None, **kwargs):
        rows = self.sum(rows, self.mix(self.first(rows), mask, **kwargs))
        return self.sum(rows, self.mlp(self.second(rows)))

    def mix(self, rows, mask, **kwargs):
        return self.mixer(hidden_states=rows, mask=mask, **kwargs)[0]

    def sum(self, rows, other):
        return rows + other


class Sandwich(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.after, self.last = nn.Identity(), nn.Identity()

    def forward(self, rows, mask=None, **kwargs):
        rows = rows + self.after(self.mix(self.first(rows), mask, **kwargs))
        return self.last(self.mlp(self.second(rows))) + rows


class Late(Layer):
    def forward(self, rows, mask=None, **kwargs):
        rows = rows + self.first(self.mix(rows, mask, **kwargs))
        return rows + self.second(self.mlp(rows))


class Scaled(Layer):
    def sum(self, rows, other):
        return rows + other * 0.9


class Wide(Layer):
    """The sum has more bits than the rows, until it is rounded with the next one."""

    def forward(self, rows, mask=None, **kwargs):
        total = rows.float() + self.mix(self.first(rows), mask, **kwargs)
        return (total + self.mlp(self.second(total.to(rows.dtype)))).to(rows.dtype)


class Limited(Layer):
    def sum(self, rows, other):
        total = rows + other
        return total.clamp(-65504, 65504) if rows.dtype == torch.float16 else total


class LimitedInPlace(Layer):
    """A comparison with the rows after it does not show it."""

    def forward(self, rows, mask=None, **kwargs):
        return super().forward(rows.clamp_(-100, 100), mask, **kwargs)


class Parallel(Layer):
    def forward(self, rows, mask=None, **kwargs):
        normed = self.first(rows)
        return rows + self.mix(normed, mask, **kwargs) + self.mlp(self.second(rows))


class Looking(Layer):
    def mix(self, rows, mask, **kwargs):
        return super().mix(rows if mask else rows + 1, mask, **kwargs)


class LookingAtNone(Layer):
    def mix(self, rows, mask, **kwargs):
        return super().mix(rows if mask is not None else rows + 1, mask, **kwargs)


class Dropping(Layer):
    def mix(self, rows, mask, **kwargs):
        return super().mix(rows, None, **kwargs)


class Pairs(Layer):
    def forward(self, rows, mask=None, **kwargs):
        return (super().forward(rows, mask, **kwargs),)


NORMS = ["first", "second", "after", "last"]


def order_of(layer: nn.Module) -> tuple[str | None, ...] | None:
    shape = shape_of(layer, [name for name in NORMS if name in layer._modules])
    return None if shape is None else shape[:6]


def test_known_layers() -> None:
    assert order_of(Layer()) == ("first", "mixer", None, "second", "mlp", None)
    assert order_of(Sandwich()) == ("first", "mixer", "after", "second", "mlp", "last")
    assert order_of(Late()) == (None, "mixer", "first", None, "mlp", "second")


@pytest.mark.parametrize(
    "kind",
    [Scaled, Wide, Limited, LimitedInPlace, Parallel, Looking, LookingAtNone, Dropping, Pairs, nn.Linear, nn.Identity],
)
def test_other_layers_are_left_alone(kind: type[nn.Module]) -> None:
    assert order_of(kind(3, 3) if kind is nn.Linear else kind()) is None


def test_layers_with_more_inside_are_left_alone() -> None:
    for change in (
        lambda layer: layer.register_parameter("scale", nn.Parameter(torch.ones(1))),
        lambda layer: layer.register_buffer("scale", torch.ones(1)),
        lambda layer: layer.add_module("dropout", nn.Dropout()),
        lambda layer: vars(layer).update(forward=layer.forward),
    ):
        layer = Layer()
        change(layer)
        assert order_of(layer) is None


def test_arguments_that_fit() -> None:
    shape = shape_of(Layer(), NORMS[:2])
    assert isinstance(shape, LayerShape) and shape.defaults == {"mask": None}
    assert shape.fits({}) and shape.fits({"mask": 1, "other": 2}) and not shape.fits({"hidden_states": 1})
    strict = shape._replace(takes_others=False)
    assert strict.fits({"mask": 1}) and not strict.fits({"other": 2})


def attention(**fields: object) -> nn.Module:
    config = tf.LlamaConfig(hidden_size=32, num_attention_heads=4, num_key_value_heads=2, head_dim=8, **fields)
    config._attn_implementation = "sdpa"
    return modeling_llama.LlamaAttention(config, 0).eval()


def test_known_attention() -> None:
    shape = head_shape_of(attention())
    assert shape is not None
    assert shape[:6] == (8, 8, False, 8**-0.5, None, None) and shape.absent == {"cache"}


def changed(old: str, new: str) -> type[nn.Module]:
    """Llama's attention with other source."""
    source = textwrap.dedent(inspect.getsource(inspect.unwrap(modeling_llama.LlamaAttention.forward)))
    source = source[source.index("def forward") :]
    assert old in source
    names = dict(vars(modeling_llama))
    exec(source.replace(old, new), names)
    return type("Changed", (modeling_llama.LlamaAttention,), {"forward": names["forward"]})


@pytest.mark.parametrize(
    "old, new",
    [
        ("    if cache is not None:", "    query_states = query_states * 2\n    if cache is not None:"),
        ("    if cache is not None:", "    value_states = value_states + 1\n    if cache is not None:"),
        ("apply_rotary_pos_emb(query_states, key_states,", "apply_rotary_pos_emb(query_states * 2, key_states,"),
        ("key_states, cos, sin)", "key_states, sin, cos)"),
        ("scaling=self.scaling,", "scaling=torch.ones(4),"),
        ("scaling=self.scaling,", "scaling=self.scaling, s_aux=torch.ones(4),"),
        ("attn_output = self.o_proj(attn_output)", "attn_output = self.o_proj(attn_output) * 2"),
        ("attn_output = self.o_proj(attn_output)", "attn_output = self.o_proj(attn_output * 2)"),
        ("self.q_proj(hidden_states)", "self.q_proj(hidden_states + 1)"),
        ("**kwargs,\n", "\n"),
    ],
)  # fmt: skip
def test_other_attention_is_left_alone(old: str, new: str) -> None:
    module = attention()
    module.__class__ = changed("cos, sin = position_embeddings", "cos, sin = position_embeddings")
    assert head_shape_of(module) is not None
    module.__class__ = changed(old, new)
    assert head_shape_of(module) is None


@pytest.mark.parametrize("limit", [None, 0.5, 8.0, 100.0])
def test_attention_that_limits_its_heads_is_left_alone(limit: float | None) -> None:
    """OLMo limits them in place."""
    config = tf.OlmoConfig(hidden_size=32, num_attention_heads=4, clip_qkv=limit)
    module = modeling_olmo.OlmoAttention(config, 0).eval()
    assert (head_shape_of(module) is None) == (limit is not None)


def test_attention_with_more_inside_is_left_alone() -> None:
    module = attention()
    module.add_module("q_norm", nn.Identity())
    assert head_shape_of(module) is None
    for part in (nn.Identity(), nn.Linear(32, 31)):
        module = attention()
        module.q_proj = part
        assert head_shape_of(module) is None
    module = attention()
    module.head_dim = 7
    assert head_shape_of(module) is None
