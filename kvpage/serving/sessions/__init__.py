"""Sessions: the state of conversations between their requests."""
