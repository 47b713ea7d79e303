"""The weights that an engine computes with: their versions, changes in place, adapters."""
