"""Arguments of operations: checked once, and as the native calls take them."""
