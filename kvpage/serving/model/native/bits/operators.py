"""Operators of torch, by what the bits of a row depend on besides the row: the rows that one call computes with it.

    EXACT        on nothing: copies, views, and arithmetic that IEEE 754 rounds in one way
    REDUCTIONS   on the strides alone: torch sums each row by itself, in an order that its size decides
    FUNCTIONS    on the place in memory: whole vectors are taken by one formula, the last elements by another
    PRODUCTS     on the number of rows, by which a library chooses the order of its sums

Names are those of torch.ops.aten; "add_" is "add" in place. Operators that are not named are not known.
"""

VIEWS = """
    _reshape_alias _unsafe_view alias as_strided detach diagonal expand lift_fresh permute select slice split
    split_with_sizes squeeze t transpose unbind unfold unsqueeze view
"""
COPIES = """
    _local_scalar_dense _to_copy _unique2 arange argsort cat clone constant_pad_nd copy copy_ embedding empty
    empty_like empty_strided eye fill fill_ flip full full_like gather index index_copy index_copy_ index_fill
    index_fill_ index_put index_put_ index_select masked_fill masked_fill_ new_empty new_empty_strided new_full
    new_ones new_zeros nonzero ones ones_like repeat repeat_interleave roll scalar_tensor scatter scatter_
    searchsorted sort stack topk tril tril_ triu triu_ where zero_ zeros zeros_like
"""
ARITHMETIC = """
    abs abs_ add add_ addcmul addcmul_ all any bincount bitwise_and bitwise_and_ bitwise_not bitwise_or bitwise_or_
    bitwise_xor bitwise_xor_ ceil clamp clamp_ clamp_max clamp_min clamp_min_ cumsum div div_ eq floor floor_divide
    ge gt histc index_add index_add_ isin isinf isnan le logical_and logical_not logical_or lt maximum minimum mul
    mul_ ne neg neg_ reciprocal relu relu_ remainder round rsub sign sqrt sqrt_ sub sub_
"""
SUMS = """
    _fused_rms_norm _log_softmax _softmax amax amin aminmax argmax argmin linalg_vector_norm logsumexp max mean min
    native_layer_norm std sum var var_mean
"""
OF_ELEMENTS = """
    cos elu erf exp exp2 expm1 gelu hardswish leaky_relu log log1p log2 mish pow rsqrt sigmoid silu sin softplus
    tanh
"""

EXACT = frozenset((VIEWS + COPIES + ARITHMETIC).split())
REDUCTIONS = frozenset(SUMS.split())
FUNCTIONS = frozenset(OF_ELEMENTS.split())
"""Of the first argument alone: all others are numbers."""
PRODUCTS = frozenset(("_grouped_mm", "addmm", "baddbmm", "bmm", "convolution", "mm"))

OF_INTEGERS = frozenset(("cumsum",))
"""Sums that are exact of integers. Of floats they are a step of scans, over tokens that come in one call."""
LAST_AXIS_ONLY = frozenset(("_log_softmax", "_softmax"))
"""Reductions that are rows' own along the last axis alone."""
SCALED = frozenset(("add", "add_", "index_add", "index_add_", "rsub", "sub", "sub_"))
"""Sums of which one part may have a factor. Factors but 1 and -1 are rounded in one formula, and not in another."""
FLOORED = frozenset(("div", "div_", "floor_divide"))
"""Quotients that may be rounded to integers: of floats by one formula in whole vectors, and by another at their end."""
EXACT_POWERS = frozenset((1, 2, 3))
"""Exponents that torch takes by products alone."""
