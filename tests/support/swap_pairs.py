"""Pairs of blocks for swaps, and the configuration of a small model."""

import torch

from kvpage import ModelConfig

MODEL = ModelConfig(8, 2, ("full_attention",) * 3)


def pairs(*rows) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.int64).reshape(-1, 2)
