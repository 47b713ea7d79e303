"""weights_digest: equal for equal weights, another one for every other byte."""

import copy
from pathlib import Path

import pytest
import torch
import transformers as tf
from support.models import make_model

from kvpage.serving.assembly.weights_digest import weights_digest


def test_equal_weights_from_another_place_have_the_same_name(tmp_path: Path) -> None:
    model = make_model("llama")
    model.save_pretrained(tmp_path)
    loaded = tf.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=model.dtype)
    assert weights_digest(model) == weights_digest(loaded) == weights_digest(copy.deepcopy(model))
    assert weights_digest(model).startswith("LlamaForCausalLM ")


def test_every_number_counts() -> None:
    model = make_model("llama")
    names = {weights_digest(model)}
    for weight in model.state_dict().values():
        for at in (0, weight.numel() // 2, weight.numel() - 1):
            flat, before = weight.reshape(-1), weight.reshape(-1)[at].clone()
            flat[at] = before + 0.5
            names.add(weights_digest(model))
            flat[at] = before
    weights = {weight.data_ptr() for weight in model.state_dict().values()}
    assert len(names) == 1 + 3 * len(weights)


@pytest.mark.parametrize("change", ["dtype", "config", "buffer", "buffer that is not saved"])
def test_other_things_that_change_keys_and_values(change: str) -> None:
    model = make_model("llama")
    name = weights_digest(model)
    if change == "dtype":
        model = model.to(torch.bfloat16)
    elif change == "config":
        model.config.rms_norm_eps *= 2
    else:
        model.register_buffer("scale", torch.ones(1), persistent=change == "buffer")
    assert weights_digest(model) != name


def test_shapes_and_names_count() -> None:
    one, other = make_model("llama"), make_model("llama")
    for model, shape in ((one, (2, 3)), (other, (3, 2))):
        model.register_buffer("table", torch.arange(6.0).view(shape))
    assert weights_digest(one) != weights_digest(other)
