"""Two bounds of a decode step: its bytes, and the model without attention, captured in a CUDA graph, plus attention's.

    one token of each sequence ─► embeddings, products, norms, rotations, logits ─► one replay of a graph
    K and V of all tokens before it ─► read once, at the bandwidth of a large copy in the same run
    weights, K and V ─► read once, likewise: no step is faster, whatever computes it

Attention is replaced by a function that gives the queries back. On a CPU nothing is captured.
"""

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import transformers as tf

NAME = "kvpage_benchmark_without_attention"
REPLAYS, WARMUPS = 20, 3


class StepBound(NamedTuple):
    """The seconds of a step.

    model: without attention, replayed. attention, weights: their bytes at the bandwidth of a copy.
    """

    model: float
    attention: float
    weights: float

    @property
    def seconds(self) -> float:
        """The model's replay and attention, one after the other."""
        return self.model + self.attention

    @property
    def bytes(self) -> float:
        """All that a step must read."""
        return self.weights + self.attention


def queries_alone(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Stand for attention: [1, tokens, heads, size]. K and V are computed, and left."""
    return query.transpose(1, 2).contiguous(), None


def kv_bytes(config: tf.PretrainedConfig, num_tokens: int, dtype: torch.dtype) -> int:
    """Return the bytes of K and V of so many tokens in all layers."""
    return 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * dtype.itemsize * num_tokens


def weight_bytes(model: Any) -> int:
    """Return the bytes of weights that a step reads: all, but of an embedding that is no head, too, only some rows."""
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    looked_up = 0 if embedding is head else embedding.nbytes
    return sum(weight.nbytes for weight in model.parameters()) - looked_up


def copy_bandwidth(device: torch.device, num_bytes: int) -> float:
    """Return bytes a second, read and written, of one large copy: the best of several."""
    source = torch.ones(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * num_bytes / min(_seconds(lambda: target.copy_(source), device, 3) for _ in range(5))


def step_bound(model: Any, num_seqs: int, context: int, bandwidth: float) -> StepBound:
    """Measure the bound of a decode step of `num_seqs` sequences of `context` tokens. The model is as it was
    afterwards.
    """
    tf.AttentionInterface.register(NAME, queries_alone)
    before = model.config._attn_implementation
    model.set_attn_implementation(NAME)
    try:
        seconds = _seconds(captured(model, num_seqs, context), model.device, REPLAYS)
    finally:
        model.set_attn_implementation(before)
    attention = kv_bytes(model.config, num_seqs * context, model.dtype)
    return StepBound(seconds, attention / bandwidth, weight_bytes(model) / bandwidth)


def captured(model: Any, num_seqs: int, context: int) -> Callable[[], object]:
    """Return the step's replay on a GPU, the step itself elsewhere."""
    tokens = torch.ones(1, num_seqs, dtype=torch.int64, device=model.device)
    positions = torch.full_like(tokens, context)

    @torch.no_grad()
    def step() -> torch.Tensor:
        return model(input_ids=tokens, position_ids=positions, use_cache=False).logits

    if model.device.type != "cuda":
        return step
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARMUPS):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def _seconds(call: Callable[[], object], device: torch.device, number: int) -> float:
    """The mean of several calls one after the other, until the device is done."""
    call()
    _wait(device)
    before = time.perf_counter()
    for _ in range(number):
        call()
    _wait(device)
    return (time.perf_counter() - before) / number


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
