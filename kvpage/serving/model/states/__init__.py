"""Models whose layers keep a state: their groups, and a forward pass that computes packed rows piece by piece."""
