"""Records of bytes by key, over the tiers of a store."""
