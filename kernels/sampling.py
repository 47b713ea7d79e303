"""The choice of a token from each row of logits, without a sort and without the host: two launches for all rows.

    survey   each block of 256 logits: the greatest, and the sum of shares           reads all logits once
    choose   a row: the likeliest token; or a block, then a token in it;             reads one block
             or top_k, top_p and min_p among the blocks that may hold such tokens    reads those blocks

A token is the one that csrc/sampling chooses from the same bits, whatever the batch and the tiles. Rows of logits are
16 bytes apart, or a multiple of it, for loads of 16 bytes.
"""

import triton
import triton.language as tl

from kvpage.kernels.sampling_rules import (
    FREQUENCY,
    RECORD_WORDS,
    SEED,
    TEMPERATURE,
    TOKEN_WORDS,
    TOP_K,
    TOP_P,
    high_float,
    low_float,
    ruled_logits,
)
from kvpage.kernels.sampling_search import (
    flat,
    held_keys,
    last_kept_key,
    last_key_of_blocks,
    list_blocks,
    listed_keys,
    listed_tokens,
)
from kvpage.kernels.sampling_weights import (
    END_KEY,
    keys_of,
    masses_of,
    shares_of,
    target_of,
    to_log2,
    uniform,
    weights_of,
)

LEAST_SCORE = tl.constexpr(-87.0)
LEAST_REST = tl.constexpr(2.0**-11)  # a rest below it is too small to bound a nucleus by
BOUND_SLACK = tl.constexpr(0.125)


@triton.jit(do_not_specialize_on_alignment=["record_ptr", "position_ptr"])
def survey_kernel(
    logits_ptr,  # [num_rows, vocab_size], as integers
    record_ptr,  # int64 [num_rows, RECORD_WORDS]
    position_ptr,  # int64 [num_rows]
    top_ptr,  # fp32 [num_rows, block_stride]: the greatest logit of each block; +inf where a logit is none
    share_ptr,  # int64 [num_rows, block_stride]: the sum of the shares of each block
    logits_stride, vocab_size, block_stride,
    SHAPE: tl.constexpr,  # SamplingShape
):  # fmt: skip
    BLOCK: tl.constexpr = SHAPE.value.BLOCK
    SURVEY_BLOCKS: tl.constexpr = SHAPE.value.SURVEY_BLOCKS
    ROW: tl.constexpr = SHAPE.value.ROW
    row = tl.program_id(1).to(tl.int64)
    record_ptr += row * RECORD_WORDS
    block = tl.program_id(0) * SURVEY_BLOCKS + tl.arange(0, SURVEY_BLOCKS)
    token = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    position = tl.load(position_ptr + row)
    logits = ruled_logits(logits_ptr + row * logits_stride, token, vocab_size, record_ptr, position, ROW)
    tops = tl.max(logits, 1)
    tl.store(top_ptr + row * block_stride + block, tops)
    temperature = low_float(tl.load(record_ptr + TEMPERATURE))
    if temperature > 0:
        shares = shares_of(logits, tops[:, None], to_log2(temperature))
        tl.store(share_ptr + row * block_stride + block, tl.sum(shares.to(tl.int64), 1))


@triton.jit
def choose_one(
    logits_ptr, tops, block, top, shares, temperature, point, vocab_size, record_ptr, position, SHAPE: tl.constexpr
):
    """Return the first token with the greatest logit; or, with a temperature, draw among all: a block, then a token."""
    BLOCK: tl.constexpr = SHAPE.value.BLOCK
    ROW: tl.constexpr = SHAPE.value.ROW
    is_drawn = temperature > 0
    factor = to_log2(tl.where(is_drawn, temperature, 1.0))
    masses = masses_of(shares, tops, top, factor)
    ends = tl.cumsum(masses, 0)
    target = target_of(point, point * 0 + 1, tl.sum(masses, 0))
    drawn = tl.sum((ends <= target).to(tl.int32), 0)
    drawn = tl.where(is_drawn, drawn, tl.min(tl.where(tops >= top, block, SHAPE.value.NUM_BLOCKS), 0))
    mass = tl.sum(tl.where(block == drawn, masses, 0), 0)
    inside = target - tl.sum(tl.where(block == drawn, ends - masses, 0), 0)
    block_top = tl.max(tl.where(block == drawn, tops, float("-inf")), 0)
    offset = tl.arange(0, BLOCK)
    logits = ruled_logits(logits_ptr, drawn * BLOCK + offset, vocab_size, record_ptr, position, ROW)
    parts = shares_of(logits, block_top, factor).to(tl.int64)
    target = target_of(inside.to(tl.float64), mass.to(tl.float64), tl.sum(parts, 0))
    drawn_place = tl.sum((tl.cumsum(parts, 0) <= target).to(tl.int32), 0)
    likeliest_place = tl.min(tl.where(logits >= top, offset, BLOCK), 0)
    return drawn * BLOCK + tl.where(is_drawn, drawn_place, likeliest_place)


@triton.jit
def draw_held(key_ptr, id_ptr, num_keys, last_key, point, SHAPE: tl.constexpr):
    """Draw among the tokens that scan_keys has written."""
    weights = weights_of(held_keys(key_ptr, num_keys, SHAPE), last_key)
    target = target_of(point, point * 0 + 1, tl.sum(weights, 0))
    return tl.load(id_ptr + tl.sum((tl.cumsum(weights, 0) <= target).to(tl.int32), 0))


@triton.jit
def draw_listed(
    list_ptr, num_listed, last_key, target, logits_ptr, vocab_size, record_ptr, position, top, SHAPE: tl.constexpr
):
    """Draw among the tokens of the listed blocks: some blocks, then a token in them."""
    GROUP: tl.constexpr = SHAPE.value.GROUP
    BLOCK: tl.constexpr = SHAPE.value.BLOCK
    before = target * 0
    begin = num_listed * 0
    drawn = begin - 1
    while drawn < 0:
        token = listed_tokens(list_ptr, begin, num_listed, SHAPE)
        keys = listed_keys(logits_ptr, token, vocab_size, record_ptr, position, top, SHAPE)
        ends = before + tl.cumsum(flat(weights_of(keys, last_key)), 0)
        index = tl.sum((ends <= target).to(tl.int32), 0)
        if index < GROUP * BLOCK:
            drawn = tl.load(list_ptr + begin + index // BLOCK) * BLOCK + index % BLOCK
        before = tl.max(ends, 0)
        begin += GROUP
    return drawn


@triton.jit
def last_of_nucleus(rest, total, vocab_size):
    """Return a key that no token is past without which the likeliest ones make up less than 1 - `rest` of the total."""
    weight = total.to(tl.float64) * 5.820766091346741e-11  # 2**-34
    score = tl.log((rest * weight / vocab_size).to(tl.float32)) - BOUND_SLACK
    score = tl.where(rest < LEAST_REST, LEAST_SCORE, tl.minimum(tl.maximum(score, LEAST_SCORE), 0.0))
    return score.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def draw_kept(
    key_ptr, id_ptr, list_ptr, logits_ptr, tops, block, top, shares, temperature, least_key, top_k, top_p, point,
    vocab_size, record_ptr, position, SHAPE: tl.constexpr,
):  # fmt: skip
    """Draw among the tokens that top_k, top_p and min_p leave. least_key: min_p's."""
    CAPACITY: tl.constexpr = SHAPE.value.CAPACITY
    IS_SHORT: tl.constexpr = SHAPE.value.IS_SHORT
    limit = top_k.to(tl.int32) * 0 + (END_KEY - 1)
    total = top_k * 0
    block_keys = keys_of(tops, top, temperature)
    if top_k > 0:
        limit = last_key_of_blocks(block_keys, top_k)
    elif top_p >= 1:
        limit = tl.minimum(limit, least_key)
    elif not IS_SHORT:
        total = tl.sum(masses_of(shares, tops, top, to_log2(temperature)), 0) * 8
        limit = tl.minimum(last_of_nucleus(1.0 - top_p, total, vocab_size), least_key)
    num_listed = list_blocks(list_ptr, block_keys, block, limit)
    last, num_keys, weight = last_kept_key(
        key_ptr, id_ptr, list_ptr, num_listed, limit, least_key, top_k, top_p, total,
        logits_ptr, vocab_size, record_ptr, position, top, SHAPE,
    )  # fmt: skip
    if num_keys <= CAPACITY:
        token = draw_held(key_ptr, id_ptr, num_keys, last, point, SHAPE)
    else:
        target = target_of(point, point * 0 + 1, weight)
        token = draw_listed(
            list_ptr, num_listed, last, target, logits_ptr, vocab_size, record_ptr, position, top, SHAPE
        )
    return token


@triton.jit(do_not_specialize_on_alignment=["record_ptr", "position_ptr", "token_ptr"])
def choose_kernel(
    logits_ptr, record_ptr, position_ptr, top_ptr, share_ptr,  # as survey_kernel's
    list_ptr,  # int32 [num_rows, block_stride]
    held_ptr,  # int32 [num_rows, 2, CAPACITY]
    token_ptr,  # int32 [num_rows]: -1 where no token can be chosen
    logits_stride, vocab_size, block_stride,
    SHAPE: tl.constexpr,  # SamplingShape
):  # fmt: skip
    CAPACITY: tl.constexpr = SHAPE.value.CAPACITY
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * logits_stride
    record_ptr += row * RECORD_WORDS
    list_ptr += row * block_stride
    held_ptr += row * (2 * CAPACITY)
    block = tl.arange(0, SHAPE.value.NUM_BLOCKS)
    num_blocks = tl.cdiv(vocab_size, SHAPE.value.BLOCK)
    tops = tl.load(top_ptr + row * block_stride + block, mask=block < num_blocks, other=float("-inf"))
    top = tl.max(tops, 0)
    position = tl.load(position_ptr + row)
    temperature_word = tl.load(record_ptr + TEMPERATURE)
    temperature = low_float(temperature_word)
    token = tl.program_id(0) * 0 - 1
    if (top < float("inf")) & (top > float("-inf")):
        least_score = high_float(temperature_word)
        top_p = tl.load(record_ptr + TOP_P).to(tl.float64, bitcast=True)
        top_k = tl.load(record_ptr + TOP_K)
        top_k = tl.where(top_k < vocab_size, top_k, 0)
        point = uniform(tl.load(record_ptr + SEED), position)
        num_surveyed = tl.where(temperature > 0, num_blocks, 0)
        shares = tl.load(share_ptr + row * block_stride + block, mask=block < num_surveyed, other=0)
        if (temperature > 0) & ((top_k > 0) | (top_p < 1) | (least_score > LEAST_SCORE)):
            least_key = tl.minimum(least_score.to(tl.int32, bitcast=True) & 0x7FFFFFFF, END_KEY - 1)
            token = draw_kept(
                held_ptr, held_ptr + CAPACITY, list_ptr, logits_ptr, tops, block, top, shares, temperature,
                least_key, top_k, top_p, point, vocab_size, record_ptr, position, SHAPE,
            )  # fmt: skip
        else:
            token = choose_one(
                logits_ptr, tops, block, top, shares, temperature, point, vocab_size, record_ptr, position, SHAPE
            )
        if (tl.load(record_ptr + FREQUENCY) >> 32) != 0:
            word_ptr = tl.load(record_ptr + TOKEN_WORDS).to(tl.pointer_type(tl.int32)) + token
            tl.store(word_ptr, tl.load(word_ptr) + 1)
    tl.store(token_ptr + row, token)
