"""Pairs of blocks for swaps, the names of layouts, and the configuration of a small model."""

import itertools

import torch

from kvpage import ModelConfig

MODEL = ModelConfig(8, 2, ("full_attention",) * 3)
FLASH_NAMES = [
    {"backend": backend, "kv_layout": kv_layout, "layer_layout": layer_layout}
    for backend, kv_layout, layer_layout in itertools.product(
        ("flash", "flashinfer"), ("NHD", "HND"), ("separate", "packed")
    )
]
NAMES = FLASH_NAMES + [
    {"backend": backend, "layer_layout": layer_layout}
    for backend, layer_layout in itertools.product(("mla", "paged"), ("separate", "packed"))
]


def pairs(*rows) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.int64).reshape(-1, 2)
