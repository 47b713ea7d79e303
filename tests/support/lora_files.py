"""Adapters in peft's file format, and models whose weights have them added."""

import copy
import json
import math
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn
from transformers import PreTrainedModel

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def targets(model: nn.Module, names: tuple[str, ...] = ALL, layers: tuple[int, ...] | None = None) -> list[str]:
    """Return the paths of the linear layers with these names, in all layers or some."""
    paths = [path for path, module in model.named_modules() if isinstance(module, nn.Linear)]
    wanted = [path for path in paths if path.rpartition(".")[2] in names]
    return [path for path in wanted if layers is None or int(path.split("layers.")[1].split(".")[0]) in layers]


def write_adapter(
    folder: Path, model: nn.Module, paths: list[str], seed: int = 0, rank: int = 4, **settings: object
) -> Path:
    """Write an adapter of random numbers, as peft's save_pretrained does."""
    generator, weights = torch.Generator().manual_seed(seed), {}
    for path in paths:
        layer = model.get_submodule(path)
        shapes = {"A": (rank, layer.in_features), "B": (layer.out_features, rank)}
        for part, shape in shapes.items():
            weights[f"base_model.model.{path}.lora_{part}.weight"] = torch.randn(shape, generator=generator) * 0.3
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "bias": "none", "lora_dropout": 0.5, **settings}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(weights, folder / "adapter_model.safetensors")
    return folder


def merged(model: PreTrainedModel, folder: Path) -> PreTrainedModel:
    """Return a copy of the model with W + scaling B A in place of each W."""
    from safetensors.torch import load_file

    model, weights = copy.deepcopy(model), load_file(folder / "adapter_model.safetensors")
    config = json.loads((folder / "adapter_config.json").read_text())
    for name in [name for name in weights if "lora_A" in name]:
        a, b = weights[name], weights[name.replace("lora_A", "lora_B")]
        scaling = config["lora_alpha"] / (math.sqrt(len(a)) if config.get("use_rslora") else len(a))
        layer = model.get_submodule(name.removeprefix("base_model.model.").removesuffix(".lora_A.weight"))
        with torch.no_grad():
            layer.weight.add_(scaling * b @ a)
    return model
