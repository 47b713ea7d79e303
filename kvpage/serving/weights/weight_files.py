"""read_weights: other weights of the same model, from the safetensors files of a folder."""

from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn


def read_weights(model: nn.Module, folder: Path) -> Callable[[], None]:
    """Read weights, and return the function that copies them into a model's own. Any thread may read.

    Args:
        model: The model.
        folder: With `*.safetensors` files, as transformers' `save_pretrained` writes them.

    Returns:
        The function. It is called once, between two steps.

    Raises:
        ValueError: There is no such folder, or it has no such file, or weights of other names or shapes, or lacks some.
        OSError: A file cannot be read.
    """
    if not folder.is_dir():
        raise ValueError(f"weights must be in a folder, {folder.name!r} is no such folder")
    weights: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        try:
            weights.update(load_file(path))
        except SafetensorError as error:
            raise ValueError(f"weights must be safetensors, {path.name} is none: {error}") from error
    state = model.state_dict()
    _check(state, weights)

    @torch.no_grad()
    def change() -> None:
        for name, weight in weights.items():
            state[name].copy_(weight)

    return change


def _check(state: dict[str, torch.Tensor], weights: dict[str, torch.Tensor]) -> None:
    """Raise ValueError unless these are all weights of the state; those that share memory count for each other."""
    for name, weight in weights.items():
        if name not in state or state[name].shape != weight.shape:
            expected = "none" if name not in state else f"one of {list(state[name].shape)}"
            raise ValueError(f"weights must be the model's, got {name!r} of {list(weight.shape)}, it has {expected}")
    written = {state[name].data_ptr() for name in weights}
    lacking = [name for name, tensor in state.items() if name not in weights and tensor.data_ptr() not in written]
    if lacking:
        raise ValueError(f"weights must be all of the model's, {len(lacking)} are missing, {lacking[0]!r} among them")
