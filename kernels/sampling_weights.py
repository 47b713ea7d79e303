"""Whole weights of tokens, and random numbers: bit for bit as csrc/sampling makes them, in kernels.

    share    2**25 * e**((logit - its block's greatest) / temperature), cut off after the point     int32
    weight   2**34 * e**score, cut off after the point                                              int64
    key      the bits of |score|: the likeliest token has 0, and keys ascend as tokens become less likely

Sums of whole numbers are the same in every order. Each product and sum rounds by itself: launch with
`enable_fp_fusion=False`.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.44269504)
SHARE_BITS = tl.constexpr(25)
WEIGHT_BITS = tl.constexpr(34)
LOWEST = tl.constexpr(-3.4028234663852886e38)  # the lowest finite number of fp32
END_KEY = tl.constexpr(0x42AE0001)  # after the key of the score -87, below which a token has no weight
NO_KEY = tl.constexpr(0x7FFFFFFF)


@triton.jit
def raise_2_to(x, EXPONENT: tl.constexpr):
    """Return 2**(x + EXPONENT) for x <= 0; about 2**(EXPONENT - 126) below -126."""
    ROUND: tl.constexpr = 12582912.0 + 127.0 + EXPONENT  # adding it leaves the exponent's bits lowest
    x = tl.maximum(x, -126.0)
    shifted = x + ROUND
    r = x - (shifted - ROUND)
    square = r * r
    high = (r * 1.3264714507386088e-3 + 9.671513922512531e-3) * square + (
        r * 5.550733953714371e-2 + 0.24022242426872253
    )
    p = high * square + (r * 0.6931470036506653 + 1.0)
    return p * (shifted.to(tl.int32, bitcast=True) << 23).to(tl.float32, bitcast=True)


@triton.jit
def to_log2(temperature):
    """Return the factor by which logits become logarithms of weights, to the base of 2."""
    return tl.div_rn(temperature * 0.0 + LOG2E, temperature)


@triton.jit
def shares_of(logits, top, factor):
    """Return the shares of logits of blocks, int32. top: the greatest logit of each one's block."""
    return raise_2_to((logits - tl.maximum(top, LOWEST)) * factor, SHARE_BITS).to(tl.int32)


@triton.jit
def masses_of(shares, tops, top, factor):
    """Return the masses of blocks beside each other: 2**31 for one token with the greatest logit. int64.

    shares: the sums of the blocks' shares. tops: the greatest logit of each block; top: of all.
    """
    factors = raise_2_to((tops - top) * factor, 0)
    return (shares.to(tl.float64) * factors.to(tl.float64) * 64.0).to(tl.int64)


@triton.jit
def keys_of(logits, top, temperature):
    scores = tl.div_rn(logits - top, temperature)
    return scores.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def weights_of(keys, last_key):
    """Return the weights of keys, int64; 0 past last_key, which is below END_KEY."""
    scores = (keys | -0x80000000).to(tl.float32, bitcast=True)
    is_kept = keys <= last_key
    scaled = raise_2_to(tl.where(is_kept, scores, 0.0) * LOG2E, WEIGHT_BITS)
    return tl.where(is_kept, scaled.to(tl.int64), 0)


@triton.jit
def target_of(part, whole, total):
    """Return the place of `part` of `whole`, fp64, among `total`, int64 and above 0: below it."""
    return tl.minimum((part / whole * total.to(tl.float64)).to(tl.int64), total - 1)


@triton.jit
def uniform(seed, position):
    """Return Philox-4x32-10's number in [0, 1 - 2**-53] for a seed and a position, both 64 bits: fp64."""
    a = position.to(tl.uint32)
    b = (position >> 32).to(tl.uint32)
    c = a * 0
    d = a * 0
    key_a = seed.to(tl.uint32)
    key_b = (seed >> 32).to(tl.uint32)
    for _ in tl.static_range(10):
        even = a.to(tl.uint64) * 0xD2511F53
        odd = c.to(tl.uint64) * 0xCD9E8D57
        a = (odd >> 32).to(tl.uint32) ^ b ^ key_a
        c = (even >> 32).to(tl.uint32) ^ d ^ key_b
        b = odd.to(tl.uint32)
        d = even.to(tl.uint32)
        key_a = key_a + 0x9E3779B9
        key_b = key_b + 0xBB67AE85
    mantissa = (a.to(tl.uint64) << 21) ^ (b >> 11).to(tl.uint64)
    return mantissa.to(tl.int64).to(tl.float64) * 1.1102230246251565e-16  # 2**-53
