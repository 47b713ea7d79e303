"""The rows that attention reads: gathered out of blocks by table lookups, and widened to the type of the products.

one key      position ─► block_id = table[position // BLOCK_SIZE], offset = position % BLOCK_SIZE ─► a row
a row        SIZE elements in runs of RUN
stored as    "float", "int8" and, from sm_89 on, "e4m3": converted by the device; "e5m2", "e4m3 bits": by integers

8-bit floats are exact in fp16. Their products are in fp16 unless the queries are fp32.
"""

import triton
import triton.language as tl


@triton.jit
def load_rows(
    ptr, row, wanted, run_stride, BEGIN: tl.constexpr, SIZE: tl.constexpr, TILE: tl.constexpr, RUN: tl.constexpr
):  # row: int64, in elements
    """Return [len(row), TILE]: the elements from BEGIN on of each row; 0 past SIZE elements, and where not wanted."""
    column = BEGIN + tl.arange(0, TILE)
    offset = column
    if RUN < SIZE:
        offset = (column // RUN).to(tl.int64) * run_stride + column % RUN
    mask = wanted[:, None]
    if BEGIN + TILE > SIZE:
        mask = mask & (column < SIZE)[None, :]
    return tl.load(ptr + (row[:, None] + offset[None, :]), mask=mask, other=0)


@triton.jit
def widen(rows, STORED: tl.constexpr, COMPUTE: tl.constexpr):
    """Return the rows in COMPUTE, exact for each stored type but a wider float."""
    if STORED == "e4m3 bits":
        bits = rows.to(tl.int16)
        # As fp16 its exponent is 8 too small; a product is exact, of subnormals too.
        number = (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True) * 256.0
        return tl.where((bits & 0x7F) == 0x7F, float("nan"), number).to(COMPUTE)
    elif STORED == "e4m3":
        return rows.to(tl.float8e4nv, bitcast=True).to(COMPUTE)
    elif STORED == "e5m2":
        return (rows.to(tl.int16) << 8).to(tl.float16, bitcast=True).to(COMPUTE)  # the upper half of an fp16
    else:
        return rows.to(COMPUTE)


@triton.jit
def power_of_two_below(numbers):
    """Return the power of two below each fp32 magnitude; 2^-126 for a smaller one."""
    bits = tl.maximum(numbers, 1.1754943508222875e-38).to(tl.int32, bitcast=True) & 0x7F800000
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def load_queries(query_ptr, query_row, valid, factor, A: tl.constexpr):
    """Return (rows, their columns after KEY_TILE if there are any, the factor of their scores)."""
    SIZE: tl.constexpr = A.value.KEY_SIZE
    TILE: tl.constexpr = A.value.KEY_TILE
    TAIL: tl.constexpr = A.value.KEY_TAIL
    q = load_rows(query_ptr, query_row, valid, 0, 0, SIZE, TILE, SIZE).to(tl.float32)
    q_tail = q
    if TAIL > 0:
        q_tail = load_rows(query_ptr, query_row, valid, 0, TILE, SIZE, TAIL, SIZE).to(tl.float32)
    row_factor = tl.zeros([query_row.shape[0]], tl.float32) + factor
    if A.value.NORMALIZE:
        largest = tl.max(tl.abs(q), 1)
        if TAIL > 0:
            largest = tl.maximum(largest, tl.max(tl.abs(q_tail), 1))
        unit = power_of_two_below(largest)
        row_factor *= unit
        q = q / unit[:, None]
        if TAIL > 0:
            q_tail = q_tail / unit[:, None]
    return q.to(A.value.COMPUTE), q_tail.to(A.value.COMPUTE), row_factor


@triton.jit
def score(q, q_tail, key_ptr, key_row, wanted, run_stride, A: tl.constexpr):
    """Return (products of each query with each key, the keys' first KEY_TILE columns)."""
    SIZE: tl.constexpr = A.value.KEY_SIZE
    TILE: tl.constexpr = A.value.KEY_TILE
    TAIL: tl.constexpr = A.value.KEY_TAIL
    RUN: tl.constexpr = A.value.KEY_RUN
    STORED: tl.constexpr = A.value.STORED
    COMPUTE: tl.constexpr = A.value.COMPUTE
    PRECISION: tl.constexpr = A.value.PRECISION
    k = widen(load_rows(key_ptr, key_row, wanted, run_stride, 0, SIZE, TILE, RUN), STORED, COMPUTE)
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    if TAIL > 0:
        k_tail = load_rows(key_ptr, key_row, wanted, run_stride, TILE, SIZE, TAIL, RUN)
        scores = tl.dot(q_tail, tl.trans(widen(k_tail, STORED, COMPUTE)), scores, input_precision=PRECISION)
    return scores, k


@triton.jit
def load_values(value_ptr, value_row, wanted, run_stride, A: tl.constexpr):
    """Return [keys, VALUE_TILE] in COMPUTE."""
    SIZE: tl.constexpr = A.value.VALUE_SIZE
    TILE: tl.constexpr = A.value.VALUE_TILE
    RUN: tl.constexpr = A.value.VALUE_RUN
    return widen(
        load_rows(value_ptr, value_row, wanted, run_stride, 0, SIZE, TILE, RUN), A.value.STORED, A.value.COMPUTE
    )
