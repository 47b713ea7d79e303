"""Several tiers as one: reading, writing and copying records over them."""
