"""The rules of a row that name tokens, applied to its logits as they are loaded: as csrc/sampling/token_rules.cpp.

    logit_bias ─► penalties of tokens seen ─► tokens that must not come yet ─► suppressed tokens

A row's record is words of 64 bits, see kvpage/layout/sampling_record.py, which kvpage/serving/sampling/device_rows.py
packs. Two tables of the row's own say what holds for each token: a bias, fp32, and a word of 32 bits:

    COUNT_BITS    how often the token was generated
    SUPPRESSED    it is suppressed
    ENDS          it ends the sequence, and must not come before a position
    NOT_FIRST     it must not come first
    SEEN          the sequence holds it
"""

import triton
import triton.language as tl

from kvpage.kernels.quantize import to_fp32
from kvpage.layout import sampling_record
from kvpage.layout.sampling_record import word_of

RECORD_WORDS = tl.constexpr(sampling_record.RECORD_WORDS)
SEED = tl.constexpr(word_of("seed"))
TOKEN_WORDS = tl.constexpr(word_of("words"))
BIASES = tl.constexpr(word_of("biases"))
TOP_P = tl.constexpr(word_of("top_p"))
TOP_K = tl.constexpr(word_of("top_k"))
TEMPERATURE = tl.constexpr(word_of("temperature", "least_score"))
REPETITION = tl.constexpr(word_of("repetition", "presence"))
FREQUENCY = tl.constexpr(word_of("frequency", "counts"))
BARRED_UNTIL = tl.constexpr(word_of("barred_until"))
FIRST_AT = tl.constexpr(word_of("first_at"))

COUNT_BITS = tl.constexpr(sampling_record.COUNT_BITS)
SUPPRESSED = tl.constexpr(sampling_record.SUPPRESSED)
ENDS = tl.constexpr(sampling_record.ENDS)
NOT_FIRST = tl.constexpr(sampling_record.NOT_FIRST)
SEEN_BITS = tl.constexpr(sampling_record.SEEN | sampling_record.COUNT_BITS)


@triton.jit
def low_float(word):
    return word.to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def high_float(word):
    return (word >> 32).to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def penalized(logits, words, record_ptr):
    repetition_word = tl.load(record_ptr + REPETITION)
    repetition = low_float(repetition_word)
    presence = high_float(repetition_word)
    frequency = low_float(tl.load(record_ptr + FREQUENCY))
    counts = (words & COUNT_BITS).to(tl.float32)
    taken_off = presence * tl.where(counts > 0, 1.0, 0.0) + frequency * counts
    scaled = tl.where(logits < 0, logits * repetition, tl.div_rn(logits, repetition))
    return tl.where((words & SEEN_BITS) != 0, scaled - taken_off, logits)


@triton.jit
def is_ruled_out(words, record_ptr, position):
    ends = ((words & ENDS) != 0) & (position < tl.load(record_ptr + BARRED_UNTIL))
    first = ((words & NOT_FIRST) != 0) & (position == tl.load(record_ptr + FIRST_AT))
    return ((words & SUPPRESSED) != 0) | ends | first


@triton.jit
def ruled_logits(logits_ptr, token, vocab_size, record_ptr, position, ROW: tl.constexpr):
    """Return the logits of tokens after the row's rules, fp32: -inf past the vocabulary, +inf for all that are none.

    logits_ptr: the row's, as integers. token: int32. ROW: see kvpage.kernels.quantize.
    """
    inside = token < vocab_size
    logits = to_fp32(tl.load(logits_ptr + token, mask=inside, other=0), ROW)
    logits = tl.where(inside, logits, float("-inf"))
    is_number = logits < float("inf")
    biases = tl.load(record_ptr + BIASES)
    words = tl.load(record_ptr + TOKEN_WORDS)
    if biases != 0:
        bias_ptr = tl.multiple_of(biases.to(tl.pointer_type(tl.float32)), 16)
        logits = logits + tl.load(bias_ptr + token, mask=inside, other=0.0)
    if words != 0:
        word_ptr = tl.multiple_of(words.to(tl.pointer_type(tl.int32)), 16)
        word = tl.load(word_ptr + token, mask=inside, other=0)
        logits = penalized(logits, word, record_ptr)
        logits = tl.where(is_ruled_out(word, record_ptr, position), float("-inf"), logits)
    return tl.where(is_number & (logits < float("inf")), logits, float("inf"))
