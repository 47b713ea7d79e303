"""Lives of sequences: their blocks from the beginning to the end, on the device and off it."""
