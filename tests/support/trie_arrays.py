"""K and V of tries, the bytes that they keep, and walks over nodes."""

import torch

LAYERS, HEADS, SIZE = 2, 3, 4


def storage_bytes(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().nbytes()


def kv_of(num_tokens: int) -> torch.Tensor:
    return torch.randn(LAYERS, 2, HEADS, num_tokens, SIZE)


def walk(node, token_ids):
    for token_id in token_ids:
        node = node.get_token(token_id)
    return node
