"""A model whose rows have the same bits whatever is computed beside them, or the reason why it has not."""
