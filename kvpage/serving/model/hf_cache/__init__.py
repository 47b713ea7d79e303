"""The cache of transformers, as a forward takes it and writes into it."""
