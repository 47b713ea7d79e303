"""The tensors of both tiers, and how their blocks move."""
