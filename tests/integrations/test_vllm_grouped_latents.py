"""vLLM's operation on the latents of several layers at once."""

import pytest
import torch
from support.vllm_tensors import BLOCK_SIZE, DEVICES, FP8, LAYERS, RANK, ROPE, Unchanged, bits, noise

from kvpage.integrations import vllm_ops

# --- several layers --------------------------------------------------------------------------------------------------


@pytest.fixture
def grouped():
    """What makes a call of three layers: their caches are registered while the test runs."""
    made = []

    def make(form, dtype=torch.bfloat16, device="cpu"):
        shape = {"apart": (LAYERS, 5, BLOCK_SIZE), "slab": (5, LAYERS, BLOCK_SIZE), "token": (5, BLOCK_SIZE, LAYERS)}
        slab = noise(*shape[form], (RANK + ROPE) * dtype.itemsize, device=device).view(dtype)
        caches = slab.unbind({"apart": 0, "slab": 1, "token": 2}[form])
        made.extend(caches)
        vllm_ops.register_caches(caches)
        return slab, list(caches)

    yield make
    vllm_ops.unregister_caches(made)


def call_of(caches, num_tokens=6, device="cpu", **changes):
    rows = torch.randn(LAYERS, num_tokens, RANK + ROPE).bfloat16().to(device)
    slots = torch.stack([torch.randperm(20)[:num_tokens] for _ in range(LAYERS)])
    slots[:, 1:2] = -1
    given = {
        "kv_c": rows[..., :RANK],
        "k_pe": rows[..., RANK:],
        "kv_cache_ptrs": torch.tensor([cache.data_ptr() for cache in caches], device=device),
        "slot_mapping": slots.to(device),
        "block_size": BLOCK_SIZE,
        "block_stride": caches[0].stride(0),
        "entry_stride": caches[0].stride(1),
    }
    return given | changes


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("form", ["apart", "slab", "token"])
@pytest.mark.parametrize("kind", ["auto", "bfloat16", "fp8", "fp8_e5m2"])
@pytest.mark.parametrize("num_tokens", [0, 1, 6])
def test_layers_together_are_layers_one_by_one(grouped, device, form, kind, num_tokens):
    stored = {"fp8": FP8, "fp8_e5m2": torch.float8_e5m2}.get(kind)
    slab, caches = grouped(form, torch.bfloat16 if stored is None else torch.uint8, device)
    scales = None if stored is None else torch.tensor([0.1, 1.0, 3.0], device=device)
    given = call_of(caches, num_tokens, device, kv_scales=scales, kv_cache_dtype=kind)
    expected = slab.clone()
    for layer, cache in enumerate(expected.unbind({"apart": 0, "slab": 1, "token": 2}[form])):
        for token, slot in enumerate(given["slot_mapping"][layer].tolist()):
            row = torch.cat([given["kv_c"][layer, token], given["k_pe"][layer, token]])
            if stored is not None:
                most = torch.finfo(stored).max
                row = (row.float() / scales[layer]).clamp(-most, most).to(stored).view(torch.uint8)
            if slot >= 0:
                cache[slot // BLOCK_SIZE, slot % BLOCK_SIZE] = row
    vllm_ops.concat_and_cache_mla_grouped(**given)
    assert torch.equal(bits(slab), bits(expected))


def test_layers_may_share_their_slots_and_rows_may_be_padded(grouped):
    slab, caches = grouped("apart")
    given = call_of(caches)
    given["slot_mapping"] = torch.tensor([[3, 19, -1, 0]]).expand(LAYERS, -1)
    expected = slab.clone()
    for layer in range(LAYERS):
        for token, slot in ((0, 3), (1, 19), (3, 0)):
            row = torch.cat([given["kv_c"][layer, token], given["k_pe"][layer, token]])
            expected[layer, slot // BLOCK_SIZE, slot % BLOCK_SIZE] = row
    vllm_ops.concat_and_cache_mla_grouped(**given)
    assert torch.equal(bits(slab), bits(expected))


def changed(tensor, place, value):
    tensor = tensor.clone()
    tensor[place] = value
    return tensor


GROUP_ERRORS = {
    "a slot of the last layer past the cache": (
        lambda given: {"slot_mapping": changed(given["slot_mapping"], (2, 3), 20)},
        r"slot_mapping must be -1 or in \[0, 20\), got 20",
    ),
    "a slot under -1": (lambda given: {"slot_mapping": changed(given["slot_mapping"], (2, 3), -2)}, "got -2"),
    "a slot of the last layer twice": (
        lambda given: {"slot_mapping": changed(given["slot_mapping"], (2, slice(3, 5)), 7)},
        "slot_mapping must name a slot of a layer once, got 7 twice",
    ),
    "an address that is not registered": (
        lambda given: {"kv_cache_ptrs": changed(given["kv_cache_ptrs"], 2, torch.zeros(999).data_ptr())},
        "kv_cache_ptrs must name registered memory",
    ),
    "an address between elements": (
        lambda given: {"kv_cache_ptrs": given["kv_cache_ptrs"] + torch.tensor([0, 0, 1])},
        "kv_cache_ptrs must be aligned to 2 bytes",
    ),
    "less than a block": (
        lambda given: {"kv_cache_ptrs": given["kv_cache_ptrs"] + torch.tensor([0, 0, 5 * 4 * 12 * 2 - 90])},
        "kv_cache_ptrs must have a block of registered memory, got 90 bytes",
    ),
    "entries that overlap": (lambda given: {"entry_stride": 11}, "entry_stride must be at least 12"),
    "blocks that overlap": (lambda given: {"block_stride": 47}, "block_stride at least a block, got 12 and 47"),
    "blocks without slots": (lambda given: {"block_size": 0}, "block_size and the size of an entry must be positive"),
    "layers without an address": (
        lambda given: {"kv_cache_ptrs": given["kv_cache_ptrs"][:2]},
        r"kv_cache_ptrs must be \[3\], got shape \(2,\)",
    ),
    "another dtype": (lambda given: {"kv_cache_dtype": "float16"}, "key.dtype must be the cache's, torch.float16"),
    "scales without 8 bits": (lambda given: {"kv_scales": torch.ones(3)}, "kv_scales must be None for auto"),
    "a scale of zero": (
        lambda given: {"kv_scales": torch.tensor([1.0, 1.0, 0.0]), "kv_cache_dtype": "fp8"},
        "must be finite and positive",
    ),
    "a scale too few": (
        lambda given: {"kv_scales": torch.ones(2), "kv_cache_dtype": "fp8"},
        r"kv_scales must be \[3\]",
    ),
    "entries with tiles": (lambda given: {"kv_cache_dtype": "fp8_ds_mla"}, "kv_cache_dtype must be one of fp8"),
    "more slots than rows": (
        lambda given: {"slot_mapping": torch.zeros(3, 7, dtype=torch.int64) - 1},
        "slot_mapping must name a slot for each of at most 6 rows",
    ),
}


@pytest.mark.parametrize("name", GROUP_ERRORS)
def test_what_is_wrong_in_one_layer_writes_none(grouped, name):
    slab, caches = grouped("apart")
    given = call_of(caches)
    change, message = GROUP_ERRORS[name]
    given |= change(given)
    with Unchanged(slab), pytest.raises(ValueError, match=message):
        vllm_ops.concat_and_cache_mla_grouped(**given)


def test_8_bit_floats_need_scales(grouped):
    slab, caches = grouped("apart", torch.uint8)
    with Unchanged(slab), pytest.raises(TypeError, match="kv_scales must be a torch.Tensor, got NoneType"):
        vllm_ops.concat_and_cache_mla_grouped(**call_of(caches, kv_cache_dtype="fp8"))
