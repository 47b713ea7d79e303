"""The bound of bench_serving: the model's matrix products alone, each by the fastest product that this machine has.

    q, k, v          one product of [tokens, hidden] with three weights beside each other
    o                                             gate, up          one product
    down                                          lm_head           only tokens whose logits are wanted

Candidates for each shape, of which a measurement in the same run takes the fastest:

    torch            F.linear
    oneDNN packed    torch's operator over a weight in oneDNN's own layout
    MKL packed       the same in MKL's (fp32)
    kvpage           kvpage.ops.linear
    fp32             for bf16: F.linear over fp32 copies of the weights
"""

import functools
import re
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import torch
import torch.nn.functional as F
import transformers as tf

from kvpage import ops
from kvpage.benchmarks.figure import in_turns

BESIDE_EACH_OTHER = {"k_proj": "q_proj", "v_proj": "q_proj", "up_proj": "gate_proj"}
NUM_TRIED = 4  # layers, whose weights together are more than caches hold
Product = Callable[[torch.Tensor], torch.Tensor]
Weights = list[torch.Tensor]


def packed_product(weight: torch.Tensor, num_tokens: int) -> Product:
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, None)
    return lambda rows: torch.ops.mkldnn._linear_pointwise(rows, packed, None, "none", [], "")


def mkl_product(weight: torch.Tensor, num_tokens: int) -> Product:
    packed = torch.ops.mkl._mkl_reorder_linear_weight(weight, num_tokens)
    return lambda rows: torch.ops.mkl._mkl_linear(rows, packed, weight, None, num_tokens)


def fp32_product(weight: torch.Tensor, num_tokens: int) -> Product:
    if weight.dtype == torch.float32:
        raise AttributeError("weights are fp32 already")
    wide = weight.float()
    return lambda rows: F.linear(rows.float(), wide).to(weight.dtype)


CANDIDATES: dict[str, Callable[[torch.Tensor, int], Product]] = {
    "torch": lambda weight, num_tokens: lambda rows: F.linear(rows, weight),
    "oneDNN packed": packed_product,
    "MKL packed": mkl_product,
    "kvpage": lambda weight, num_tokens: lambda rows: ops.linear(rows, weight),
    "fp32": fp32_product,
}


def weights_of(model: tf.PreTrainedModel) -> tuple[list[Weights], torch.Tensor]:
    """Return the weights of the layers by kind, those of one input beside each other; and that of the last product."""
    kinds: dict[str, dict[str, Weights]] = {}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and module is not model.lm_head:
            layer, kind = re.sub(r"\.[a-z_.]*$", "", name), name.rpartition(".")[2]
            kinds.setdefault(BESIDE_EACH_OTHER.get(kind, kind), {}).setdefault(layer, []).append(module.weight)
    beside = [[torch.cat(each).detach() for each in layers.values()] for layers in kinds.values()]
    return beside, model.lm_head.weight.detach()


def fastest(weights: Weights, rows: torch.Tensor, rounds: int) -> str:
    """Return the name of the fastest candidate for so many rows."""
    calls: dict[str, Callable[[], None]] = {}
    for name, make in CANDIDATES.items():
        try:
            products = [make(weight, len(rows)) for weight in weights[:NUM_TRIED]]
            products[0](rows)
        except (RuntimeError, AttributeError):  # this torch, CPU or kvpage does not have it, or not for this dtype
            continue
        calls[name] = functools.partial(run_all, products, rows)
    taken = in_turns(calls, rounds)
    return min(taken, key=lambda one: float(np.median(taken[one])))


def run_all(products: Iterable[Product], rows: torch.Tensor) -> None:
    for product in products:
        product(rows)


class ProductsBound:
    """The products of a workload.

    batches: the number of tokens of each step, and the number of those whose logits are wanted.
    chosen: the candidate of each shape, as "512 x 768, 32 tokens"; tried once for tokens up to a power of two.
    """

    def __init__(self, model: tf.PreTrainedModel, batches: Sequence[tuple[int, int]], rounds: int) -> None:
        self.chosen: dict[str, str] = {}
        self._rounds = rounds
        layers, last = weights_of(model)
        self._steps: list[tuple[list[Product], torch.Tensor]] = []
        made: dict[tuple[int, int], list[tuple[list[Product], torch.Tensor]]] = {}
        for num_tokens, num_wanted in batches:
            if (num_tokens, num_wanted) not in made:
                made[num_tokens, num_wanted] = [self._products(weights, num_tokens) for weights in layers]
                if num_wanted:
                    made[num_tokens, num_wanted].append(self._products([last], num_wanted))
            self._steps += made[num_tokens, num_wanted]

    @torch.no_grad()
    def run(self) -> None:
        for products, rows in self._steps:
            run_all(products, rows)

    @torch.no_grad()
    def _products(self, weights: Weights, num_tokens: int) -> tuple[list[Product], torch.Tensor]:
        out, width = weights[0].shape
        rows = torch.randn(num_tokens, width).to(weights[0].dtype)
        shape = f"{width} x {out}, {1 << (num_tokens - 1).bit_length()} tokens"
        if shape not in self.chosen:
            self.chosen[shape] = fastest(weights, rows, self._rounds)
        return [CANDIDATES[self.chosen[shape]](weight, num_tokens) for weight in weights], rows
