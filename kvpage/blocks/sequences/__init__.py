"""The sequences of a BlockManager: their block tables, how they grow, and how they leave the device and come back."""
