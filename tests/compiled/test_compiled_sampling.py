"""The kernels that choose tokens as compiled for a GPU: the tokens of the CPU, from the same bits of logits."""

import numpy as np
import torch
from support.ptx.archs import BOTH, every_case

from kvpage.layout.sampling_record import ROW_RULES
from kvpage.ops import SAMPLING_RECORD, SAMPLING_RECORD_WORDS, SamplingMemory
from kvpage.serving.sampling.native_rows import GREEDY, sample_rows

SAME_FIELDS = ("seed", "top_k", "top_p", "temperature", "least_score")
CASES = {  # dtype, vocab_size
    "whole blocks": (BOTH, torch.float32, 512),
    "odd": ([90], torch.bfloat16, 301),
}


@every_case("dtype, vocab_size", CASES)
def test_tokens_are_those_of_the_cpu(device, dtype, vocab_size):
    """Greedy; drawn from all, and from what top_k, top_p and min_p leave; and from logits that are none."""
    from kvpage.kernels.sampling_launch import sample_rows as sample_on_device

    rows = np.frombuffer(GREEDY * 5, ROW_RULES).copy()
    rows["seed"], rows["position"] = [5, 2**63 - 1, 7, 8, 9], np.arange(5)
    rows["temperature"], rows["top_k"] = [0, 0.8, 1.5, 0.7, 1], [0, 0, 40, 0, 0]
    rows["top_p"], rows["least_score"] = [1, 1, 0.8, 0.9, 1], [-np.inf, -np.inf, -np.inf, -3, -np.inf]
    logits = (torch.randn(5, vocab_size) * 3).to(dtype)
    logits[4, -1] = torch.nan
    records = np.zeros(5, SAMPLING_RECORD)
    for name in SAME_FIELDS:
        records[name] = rows[name]
    words = torch.from_numpy(records.view(np.int64).reshape(5, SAMPLING_RECORD_WORDS))
    memory, out = SamplingMemory.make(5, vocab_size, "cpu"), torch.full((5,), -9, dtype=torch.int32)
    tensors = memory.tops, memory.shares, memory.lists, memory.held
    sample_on_device(logits, words, torch.from_numpy(rows["position"].copy()), out, *tensors)
    assert out.tolist() == sample_rows(logits, rows).tolist()
