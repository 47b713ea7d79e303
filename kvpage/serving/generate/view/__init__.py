"""The view of a model that a pool with `same_bits` computes with.

row_padding   the padding of rows, by the arguments of a call
packed_rows   PackedRows: the new tokens of a cache's rows as a step of the runner, and its logits as rows
bits_forward  BitsForward: the forward of the view
bits_view     bits_view: the view, on which `generate` is called
"""
