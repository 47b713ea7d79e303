"""Choose the likeliest token of each row, on the logits' device, without a wait."""

import torch


def likeliest(logits: torch.Tensor) -> torch.Tensor:
    """Return the likeliest token of each row, int64; -1 for rows that hold NaN or +inf, or no finite number.

    logits: [num_rows, vocab_size].
    """
    highest, tokens = logits.max(dim=-1)
    # torch.where would copy the -1 to the device, and wait.
    return tokens.masked_fill_(~torch.isfinite(highest), -1)
