"""Attention over latents (MLA): the heads of a layer, and a pass over them."""
