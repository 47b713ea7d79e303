"""The rows that attention reads: gathered out of blocks by table lookups, and widened to the type of the products.

one key      position ─► block_id = table[position // BLOCK_SIZE], offset = position % BLOCK_SIZE ─► a row
a row        SIZE elements in runs of RUN
stored as    "float", "int8" and, from sm_89 on, "e4m3": converted by the device; "e5m2", "e4m3 bits": by integers

8-bit floats are exact in fp16. Their products are in fp16 unless the queries are fp32.

    in pairs     a0 a1 a2 a3      two int16 of a register ─► fp16 or bf16 a0 a2, and a1 a3

Where rows are in pairs, products are of halves: of columns 0, 2, 4 ..., and of columns 1, 3, 5 ... An element of 8 bits
would be moved and converted alone; memory holds 16 bits or more for tensor cores.
"""

import triton
import triton.language as tl

from kvpage.kernels.quantize import INTERPRETED

# PTX for $2, two int16, into $0 and $1, two fp16 each.
_E4M3 = tl.constexpr("""{
    .reg .b32 t;
    .reg .b16 even, odd;
    prmt.b32 t, $2, 0, 0x3120;
    mov.b32 {even, odd}, t;
    cvt.rn.f16x2.e4m3x2 $0, even;
    cvt.rn.f16x2.e4m3x2 $1, odd;
}""")
_E5M2 = tl.constexpr("""{
    prmt.b32 $0, $2, 0, 0x2404;
    and.b32 $1, $2, 0xFF00FF00;
}""")
# By integers, with one exponent bit less: times 256. The NaN alone, 1.875, overflows times 2^15 plus 7168: times 0 that
# is a NaN again.
_E4M3_BITS = tl.constexpr("""{
    .reg .b32 t<2>, m<2>, n<2>, scale, most, rest, zero;
    mov.b32 scale, 0x5C005C00;
    mov.b32 most, 0x78007800;
    mov.b32 rest, 0x6F006F00;
    mov.b32 zero, 0;
    prmt.b32 t0, $2, 0, 0x2404;
    and.b32 t1, $2, 0xFF00FF00;
    shr.u32 m0, t0, 1;
    shr.u32 m1, t1, 1;
    and.b32 m0, m0, 0x3F803F80;
    and.b32 m1, m1, 0x3F803F80;
    lop3.b32 t0, t0, 0x80008000, m0, 0xEA;
    lop3.b32 t1, t1, 0x80008000, m1, 0xEA;
    fma.rn.f16x2 n0, m0, most, rest;
    fma.rn.f16x2 n1, m1, most, rest;
    mul.f16x2 n0, n0, zero;
    mul.f16x2 n1, n1, zero;
    fma.rn.f16x2 $0, t0, scale, n0;
    fma.rn.f16x2 $1, t1, scale, n1;
}""")
# A byte below 0x64 is 1024 plus the byte; its sign bit is turned round, so 128 too much.
_INT8_FP16 = tl.constexpr("""{
    .reg .b32 t<2>, u, upper, most;
    mov.b32 upper, 0x64646464;
    mov.b32 most, 0x64806480;
    xor.b32 u, $2, 0x80808080;
    prmt.b32 t0, u, upper, 0x4240;
    prmt.b32 t1, u, upper, 0x4341;
    sub.f16x2 $0, t0, most;
    sub.f16x2 $1, t1, most;
}""")
# Seven bits below 0x43 are 128 plus these bits. The sign bit alone below 0x43 is 256, and without it 128.
_INT8_BF16 = tl.constexpr("""{
    .reg .b32 t<2>, m<2>, n<2>, upper, minus;
    mov.b32 upper, 0x43434343;
    mov.b32 minus, 0xBF80BF80;
    prmt.b32 t0, $2, upper, 0x4240;
    prmt.b32 t1, $2, upper, 0x4341;
    and.b32 m0, t0, 0xFF7FFF7F;
    and.b32 m1, t1, 0xFF7FFF7F;
    and.b32 n0, t0, 0xFF80FF80;
    and.b32 n1, t1, 0xFF80FF80;
    fma.rn.bf16x2 $0, n0, minus, m0;
    fma.rn.bf16x2 $1, n1, minus, m1;
}""")


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
def widen_pairs(pairs, STORED: tl.constexpr, COMPUTE: tl.constexpr):
    """Return the lower and the upper byte of each int16 in COMPUTE, fp16 or bf16: two by one instruction each."""
    if INTERPRETED:
        low, high = (pairs & 0xFF).to(tl.uint8), ((pairs >> 8) & 0xFF).to(tl.uint8)
        if STORED == "int8":
            low, high = low.to(tl.int8, bitcast=True), high.to(tl.int8, bitcast=True)
        return widen(low, STORED, COMPUTE), widen(high, STORED, COMPUTE)
    elif COMPUTE == tl.bfloat16:  # noqa: SIM300 -- int8 alone: 8-bit floats are exact in fp16
        return tl.inline_asm_elementwise(
            _INT8_BF16, "=r,=r,r", [pairs], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=2
        )
    else:
        if STORED == "int8":
            CODE: tl.constexpr = _INT8_FP16
        elif STORED == "e4m3":
            CODE: tl.constexpr = _E4M3
        elif STORED == "e5m2":
            CODE: tl.constexpr = _E5M2
        else:
            CODE: tl.constexpr = _E4M3_BITS
        return tl.inline_asm_elementwise(CODE, "=r,=r,r", [pairs], dtype=(tl.float16, tl.float16), is_pure=True, pack=2)


@triton.jit
def power_of_two_below(numbers):
    """Return the power of two below each fp32 magnitude; 2^-126 for a smaller one."""
    bits = tl.maximum(numbers, 1.1754943508222875e-38).to(tl.int32, bitcast=True) & 0x7F800000
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def load_queries(query_ptr, query_row, valid, factor, A: tl.constexpr):
    """Return (rows in halves, their columns after KEY_TILE if there are any, in halves, the factor of their scores)."""
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
    q, q_odd = in_halves(q.to(A.value.COMPUTE), A.value.KEY_PAIRS)
    q_tail, q_tail_odd = in_halves(q_tail.to(A.value.COMPUTE), A.value.KEY_PAIRS)
    return q, q_odd, q_tail, q_tail_odd, row_factor


@triton.jit
def in_halves(rows, PAIRS: tl.constexpr):
    """Return columns 0, 2, 4 ... and 1, 3, 5 ... of the rows if their partners are in pairs; else the rows, twice."""
    if PAIRS:
        return tl.split(tl.reshape(rows, [rows.shape[0], rows.shape[1] // 2, 2]))
    else:
        return rows, rows


@triton.jit
def whole(even, odd, PAIRS: tl.constexpr):
    """Return rows out of their halves."""
    if PAIRS:
        return tl.reshape(tl.join(even, odd), [even.shape[0], even.shape[1] * 2])
    else:
        return even


@triton.jit
def load_wide(
    ptr, row, wanted, run_stride,
    BEGIN: tl.constexpr, SIZE: tl.constexpr, TILE: tl.constexpr, RUN: tl.constexpr, PAIRS: tl.constexpr,
    A: tl.constexpr,
):  # fmt: skip
    """Return the rows in COMPUTE, in halves if they are in PAIRS; then all is counted in pairs but the arguments."""
    STORED: tl.constexpr = A.value.STORED
    COMPUTE: tl.constexpr = A.value.COMPUTE
    if PAIRS:
        pairs = load_rows(ptr, row, wanted, run_stride, BEGIN // 2, SIZE // 2, TILE // 2, RUN // 2)
        return widen_pairs(pairs, STORED, COMPUTE)
    else:
        rows = widen(load_rows(ptr, row, wanted, run_stride, BEGIN, SIZE, TILE, RUN), STORED, COMPUTE)
        return rows, rows


@triton.jit
def multiply(q, q_odd, k, k_odd, scores, PAIRS: tl.constexpr, PRECISION: tl.constexpr):
    """Return the products of each query with each key, added to the scores that there are."""
    scores = tl.dot(q, tl.trans(k), scores, input_precision=PRECISION)
    if PAIRS:
        scores = tl.dot(q_odd, tl.trans(k_odd), scores, input_precision=PRECISION)
    return scores


@triton.jit
def score(q, q_odd, q_tail, q_tail_odd, key_ptr, key_row, wanted, run_stride, A: tl.constexpr):
    """Return (products of each query with each key, the keys' first KEY_TILE columns in halves)."""
    SIZE: tl.constexpr = A.value.KEY_SIZE
    TILE: tl.constexpr = A.value.KEY_TILE
    TAIL: tl.constexpr = A.value.KEY_TAIL
    RUN: tl.constexpr = A.value.KEY_RUN
    PAIRS: tl.constexpr = A.value.KEY_PAIRS
    PRECISION: tl.constexpr = A.value.PRECISION
    k, k_odd = load_wide(key_ptr, key_row, wanted, run_stride, 0, SIZE, TILE, RUN, PAIRS, A)
    scores = tl.zeros([q.shape[0], k.shape[0]], tl.float32)
    scores = multiply(q, q_odd, k, k_odd, scores, PAIRS, PRECISION)
    if TAIL > 0:
        k_tail, k_tail_odd = load_wide(key_ptr, key_row, wanted, run_stride, TILE, SIZE, TAIL, RUN, PAIRS, A)
        scores = multiply(q_tail, q_tail_odd, k_tail, k_tail_odd, scores, PAIRS, PRECISION)
    return scores, k, k_odd


@triton.jit
def load_values(value_ptr, value_row, wanted, run_stride, A: tl.constexpr):
    """Return [keys, VALUE_TILE] in COMPUTE, in halves."""
    SIZE: tl.constexpr = A.value.VALUE_SIZE
    TILE: tl.constexpr = A.value.VALUE_TILE
    RUN: tl.constexpr = A.value.VALUE_RUN
    return load_wide(value_ptr, value_row, wanted, run_stride, 0, SIZE, TILE, RUN, A.value.VALUE_PAIRS, A)
