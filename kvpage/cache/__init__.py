"""Cache tensors of both tiers, and the copies of their blocks."""
