"""Which tokens of a row stay, by bisection over their keys, as csrc/sampling/key_selection.h.

    keys      0      a      b  b      c        d       the mass of tokens before a key: their number, or their weights
    mass      0     .5     .7 .7     .85      .95
    target .8 |--------------------|          the last key that stays is the last with less than the target before it

The blocks whose greatest logit may stay are listed. The tokens that may stay, in order of their ids, are held in a tile
of CAPACITY keys. Where they are more, passes over the listed blocks narrow the range of keys, until a tile holds it.
"""

import triton
import triton.language as tl

from kvpage.kernels.sampling_rules import TEMPERATURE, low_float, ruled_logits
from kvpage.kernels.sampling_weights import END_KEY, NO_KEY, keys_of, weights_of

STEPS_BY_VALUE = tl.constexpr(24)


@triton.jit
def listed_tokens(list_ptr, begin, num_listed, SHAPE: tl.constexpr):
    """Return the ids [GROUP, BLOCK] of the tokens of some listed blocks, ascending; of missing blocks, huge ones."""
    GROUP: tl.constexpr = SHAPE.value.GROUP
    BLOCK: tl.constexpr = SHAPE.value.BLOCK
    index = begin + tl.arange(0, GROUP)
    block = tl.load(list_ptr + index, mask=index < num_listed, other=0x7FFFFFFF // BLOCK - 1)
    return block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]


@triton.jit
def listed_keys(logits_ptr, token, vocab_size, record_ptr, position, top, SHAPE: tl.constexpr):
    ROW: tl.constexpr = SHAPE.value.ROW
    logits = ruled_logits(logits_ptr, token, vocab_size, record_ptr, position, ROW)
    return keys_of(logits, top, low_float(tl.load(record_ptr + TEMPERATURE)))


@triton.jit
def flat(tile):
    return tl.reshape(tile, (tile.shape[0] * tile.shape[1],))


@triton.jit
def list_blocks(list_ptr, keys, block, limit):
    """List the blocks whose least key is at most `limit`, ascending. Return their number."""
    is_listed = keys <= limit
    index = tl.cumsum(is_listed.to(tl.int32), 0) - 1
    tl.store(list_ptr + index, block, mask=is_listed)
    tl.debug_barrier()
    return tl.sum(is_listed.to(tl.int32), 0)


@triton.jit
def scan_keys(
    key_ptr, id_ptr,  # int32 [CAPACITY]
    list_ptr, num_listed, low, end, writes, key,
    logits_ptr, vocab_size, record_ptr, position, top, SHAPE: tl.constexpr,
):  # fmt: skip
    """Return the number of tokens with keys below `key`, and their weight, both int64.

    writes: whether the keys in [low, end) and their tokens are written, in order, as many as there is room for.
    """
    CAPACITY: tl.constexpr = SHAPE.value.CAPACITY
    tl.debug_barrier()
    num_written = low * 0
    count = low.to(tl.int64) * 0
    weight = count
    for begin in range(0, num_listed, SHAPE.value.GROUP):
        token = listed_tokens(list_ptr, begin, num_listed, SHAPE)
        keys = listed_keys(logits_ptr, token, vocab_size, record_ptr, position, top, SHAPE)
        count += tl.sum(flat((keys < key).to(tl.int32)), 0)
        weight += tl.sum(flat(weights_of(keys, key - 1)), 0)
        if writes:
            in_order = flat(keys)
            in_range = (in_order >= low) & (in_order < end)
            index = num_written + tl.cumsum(in_range.to(tl.int32), 0) - 1
            stored = in_range & (index < CAPACITY)
            tl.store(key_ptr + index, in_order, mask=stored)
            tl.store(id_ptr + index, flat(token), mask=stored)
            num_written += tl.sum(in_range.to(tl.int32), 0)
    tl.debug_barrier()
    return count, weight


@triton.jit
def key_between(low, end, step):
    """Return a key between two that are not neighbours: by value, or by bits where that does not go on."""
    value = 0.5 * (low.to(tl.float32, bitcast=True) + end.to(tl.float32, bitcast=True))
    by_value = value.to(tl.int32, bitcast=True)
    goes_on = (step < STEPS_BY_VALUE) & (by_value > low) & (by_value < end)
    return tl.where(goes_on, by_value, low + (end - low) // 2)


@triton.jit
def last_key_in(keys, masses, low, end, before, target):
    """Return the last key in [low, end) with less than the target before it. before: the mass of keys below `low`.

    masses: of each key, below 2**47 together; less than 2**16 keys. The number of keys is summed up in the lowest bits.
    """
    parts = tl.where((keys >= low) & (keys < end), masses * 65536 + 1, 0)
    sum_below = before * 0
    num_end = tl.sum(parts, 0) & 0xFFFF
    step = low * 0
    while (num_end - (sum_below & 0xFFFF) > 1) & (end - low > 1):
        middle = key_between(low, end, step)
        sum_middle = tl.sum(tl.where(keys < middle, parts, 0), 0)
        is_less = (before + (sum_middle >> 16)).to(tl.float64) < target
        low = tl.where(is_less, middle, low)
        sum_below = tl.where(is_less, sum_middle, sum_below)
        num_end = tl.where(is_less, num_end, sum_middle & 0xFFFF)
        end = tl.where(is_less, end, middle)
        step += 1
    return end - 1


@triton.jit
def held_keys(key_ptr, num_held, SHAPE: tl.constexpr):
    index = tl.arange(0, SHAPE.value.CAPACITY)
    return tl.load(key_ptr + index, mask=index < num_held, other=NO_KEY)


@triton.jit
def last_kept_key(
    key_ptr, id_ptr, list_ptr, num_listed, limit, least_key, top_k, top_p, total,
    logits_ptr, vocab_size, record_ptr, position, top, SHAPE: tl.constexpr,
):  # fmt: skip
    """Return the last key, at most `limit`, that top_k, then top_p, and `least_key` leave; the number of keys up to
    `limit`; and, where there is no room for these, the weight of those that stay.

    total: the weight of all tokens for top_p; 0 for those that top_k leaves.
    """
    CAPACITY: tl.constexpr = SHAPE.value.CAPACITY
    last = limit
    num_keys = limit.to(tl.int64) * 0
    kept_weight = num_keys
    first = limit * 0
    for stage in range(first, first + 4):  # write the keys; top_k; top_p; sum up the weights that stay
        last = tl.where(stage == 3, tl.minimum(last, least_key), last)
        low = limit * 0
        end = last + 1
        before = num_keys * 0
        num_before = before
        num_end = num_keys
        target = top_k.to(tl.float64)
        step = stage * 0
        is_cut = ((stage == 1) & (top_k > 0)) | ((stage == 2) & (top_p < 1))
        goes_on = (stage == 0) | ((num_keys > CAPACITY) & (is_cut | (stage == 3)))
        while goes_on:
            is_narrow = (step > 0) & ((num_end - num_before <= CAPACITY) | (end - low <= 1))
            writes = (stage == 0) | is_narrow
            key = tl.where((step == 0) | writes, end, key_between(low, end, step))
            count, weight = scan_keys(
                key_ptr, id_ptr, list_ptr, num_listed, low, end, writes, key,
                logits_ptr, vocab_size, record_ptr, position, top, SHAPE,
            )  # fmt: skip
            mass = tl.where(stage == 1, count, weight)
            if step == 0:
                num_end = count
                kept_weight = weight
                if stage == 2:
                    target = top_p * tl.where(total > 0, total, weight).to(tl.float64)
            elif not writes:
                is_less = mass.to(tl.float64) < target
                low = tl.where(is_less, key, low)
                num_before = tl.where(is_less, count, num_before)
                before = tl.where(is_less, mass, before)
                end = tl.where(is_less, end, key)
                num_end = tl.where(is_less, num_end, count)
            step += 1
            goes_on = (stage > 0) & (stage < 3) & (writes == 0)
        if stage == 0:
            num_keys = num_end
        if is_cut:
            keys = held_keys(key_ptr, num_end - num_before, SHAPE)
            weights = weights_of(keys, end - 1)
            if (stage == 2) & (num_keys <= CAPACITY):
                target = top_p * tl.where(total > 0, total, tl.sum(weights, 0)).to(tl.float64)
            masses = tl.where(stage == 1, (keys < end).to(tl.int64), weights)
            last = last_key_in(keys, masses, low, end, before, target)
    return last, num_keys, kept_weight


@triton.jit
def last_key_of_blocks(keys, top_k):
    """Return a key that the top_k-th token's does not exceed, from the least key of each block; END_KEY - 1 at most."""
    low = (top_k * 0).to(tl.int32)
    return last_key_in(keys, (keys < END_KEY).to(tl.int64), low, low + END_KEY, top_k * 0, top_k.to(tl.float64))
