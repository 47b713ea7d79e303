"""Choose tokens from logits."""
