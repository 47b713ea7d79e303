"""Numbers to and from the bits that a cache stores: rounded to nearest even, saturating, as kvpage.ops.reference.

All arithmetic is on integers and fp32, so that it compiles for GPUs without 8-bit floats and means the same in the
interpreter. A row's element (ROW) is "fp32", "fp16" or "bf16"; a stored one (CODE) is "e4m3", "e5m2" or "int8".

    fp32          s eeeeeeee mmm mmmmmmmmmmmmmmmmmmmm      bias 127
    e4m3          s     eeee mmm                           bias   7    no infinity; all ones is the NaN
    e5m2          s    eeeee mm                            bias  15
"""

import os

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")


@triton.jit
def to_fp32(bits, ROW: tl.constexpr):
    """Return the numbers that the bits of rows mean."""
    if ROW == "fp32":
        numbers = bits.to(tl.float32, bitcast=True)
    elif ROW == "fp16":  # a GPU that widens a NaN drops its sign
        word = bits.to(tl.int16)
        magnitude = (word & 0x7FFF).to(tl.float16, bitcast=True).to(tl.float32).to(tl.int32, bitcast=True)
        sign = word.to(tl.int32) & -0x80000000
        numbers = (magnitude & 0x7FFFFFFF | sign).to(tl.float32, bitcast=True)
    else:
        numbers = (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    return numbers


@triton.jit
def from_fp32(numbers, ROW: tl.constexpr):
    """Return the bits of rows that mean the numbers nearest to these."""
    if ROW == "fp32":
        bits = numbers.to(tl.int32, bitcast=True)
    elif ROW == "fp16":
        bits = numbers.to(tl.float16).to(tl.int16, bitcast=True)
    elif INTERPRETED:  # it truncates
        word = numbers.to(tl.uint32, bitcast=True)
        nearest = ((word + 0x7FFF + ((word >> 16) & 1)) >> 16).to(tl.int16)
        bits = tl.where(numbers == numbers, nearest, 0x7FC0).to(tl.int16)
    else:
        bits = numbers.to(tl.bfloat16).to(tl.int16, bitcast=True)
    return bits


@triton.jit
def encode_fp8(numbers, scales, CODE: tl.constexpr):
    """Return int8 bits of the 8-bit floats nearest to numbers [rows, cols] / scales [rows]; saturating."""
    if CODE == "e4m3":
        SHIFT: tl.constexpr = 20
        BIAS: tl.constexpr = (127 - 7) << 3
        MOST: tl.constexpr = 448.0
        NORMAL: tl.constexpr = 2.0**-6
        MAGIC: tl.constexpr = 2.0**14  # its last bit in fp32 is worth one step of the subnormals, 2**-9
    else:
        SHIFT: tl.constexpr = 21
        BIAS: tl.constexpr = (127 - 15) << 2
        MOST: tl.constexpr = 57344.0
        NORMAL: tl.constexpr = 2.0**-14
        MAGIC: tl.constexpr = 2.0**7  # 2**-16
    word = numbers.to(tl.int32, bitcast=True)
    magnitude = (word & 0x7FFFFFFF).to(tl.float32, bitcast=True)
    if scales is not None:
        magnitude = tl.div_rn(magnitude, tl.broadcast_to(scales[:, None], magnitude.shape))
    magnitude = tl.where(magnitude < MOST, magnitude, MOST)
    bits = magnitude.to(tl.int32, bitcast=True)
    normal = ((bits + ((1 << (SHIFT - 1)) - 1) + ((bits >> SHIFT) & 1)) >> SHIFT) - BIAS
    subnormal = (magnitude + MAGIC).to(tl.int32, bitcast=True) & 0xFF
    code = tl.where(magnitude < NORMAL, subnormal, normal)
    code = tl.where(numbers == numbers, code, 0x7F)
    return (code | ((word >> 24) & 0x80)).to(tl.int8)


@triton.jit
def decode_fp8(codes, CODE: tl.constexpr):
    """Return in fp32, exactly, the 8-bit floats whose int8 bits these are."""
    if CODE == "e4m3":
        # Exponent and mantissa move to their places in fp32. The product adds the difference of the biases.
        numbers = ((codes.to(tl.int32) << 20) & -0x78100000).to(tl.float32, bitcast=True) * 2.0**120
        numbers = tl.where((codes & 0x7F) == 0x7F, float("nan"), numbers)
    else:
        numbers = (codes.to(tl.int16) << 8).to(tl.float16, bitcast=True).to(tl.float32)
    return numbers


@triton.jit
def encode_int8(numbers):
    """Return int8 [rows, cols] and the scale of each row [rows]: its largest magnitude becomes 127."""
    # Magnitudes order as integers do, a NaN above all numbers: a row that holds one gets no number for a scale.
    words = numbers.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    largest = tl.max(words, 1).to(tl.float32, bitcast=True)
    scales = tl.div_rn(largest, tl.full(largest.shape, 127.0, tl.float32))
    steps = tl.where(scales > 0, scales, 1.0)
    quotients = tl.div_rn(numbers, tl.broadcast_to(steps[:, None], numbers.shape))
    quotients = tl.where(quotients == quotients, quotients, 0.0)
    quotients = tl.where(quotients < 127.0, quotients, 127.0)
    quotients = tl.where(quotients > -127.0, quotients, -127.0)
    # 1.5 * 2**23: the last bit of the sum is worth one, and its low byte is what was added.
    return (quotients + 12582912.0).to(tl.int32, bitcast=True).to(tl.int8), scales
