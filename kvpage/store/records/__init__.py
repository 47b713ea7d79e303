"""Records of a store: their keys, kinds and bytes."""
