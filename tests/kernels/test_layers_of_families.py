"""Every type of decoder that transformers has, with the layers of a GPU in Triton's interpreter: minutes for some."""

import contextlib

import pytest
import torch
from support.family import WEIGHT_STDS, judge_one
from support.family_configs import decoder_types
from support.kernel_calls import INTERPRETED

pytest.importorskip("triton")
if not INTERPRETED:
    pytest.skip("the interpreter runs them", allow_module_level=True)

from kvpage.serving.assembly import parts
from kvpage.serving.model.attention import HeadAttention
from kvpage.serving.model.native.device import DeviceLayers


def has_only_to_compute(rows):
    return not torch.is_grad_enabled()


@pytest.mark.parametrize("kind", sorted(decoder_types()))
def test_a_family_has_the_tokens_of_generate(kind, monkeypatch):
    """docs/families.md tells of those that are refused."""
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(parts, "_native_layers", lambda *args: DeviceLayers(HeadAttention(), has_only_to_compute))
    family = judge_one(kind, WEIGHT_STDS[0])
    assert not family.is_wrong, family
