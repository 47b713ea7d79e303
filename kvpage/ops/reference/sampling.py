"""The choice of a token from each row of logits, in plain torch: the specification of csrc/sampling and kernels/.

    share    2**25 * e**((logit - its block's greatest) / temperature), cut off after the point
    weight   2**34 * e**score, cut off after the point;  score = (logit - the greatest) / temperature
    key      the bits of |score|: the likeliest token has 0, and keys ascend as tokens become less likely

Each product and sum of fp32 rounds by itself. Weights are whole numbers, so the order of their sums means nothing.
"""

import ctypes
import math

import torch

from kvpage.layout.sampling_record import COUNT_BITS, ENDS, NOT_FIRST, SEEN, SUPPRESSED, SamplingRecord

BLOCK = 256  # logits whose shares are summed up first
FEW_TOKENS = 4096  # of such a vocabulary, top_p is a part of the sum of all weights
SHARE_BITS, WEIGHT_BITS = 25, 34
LEAST_SCORE, END_KEY = -87.0, 0x42AE0001  # a token below the score has no weight, and a key from END_KEY on
LOG2E = 1.44269504


def sample_rows(logits: torch.Tensor, records: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Return one token a row, int32 [num_rows]; -1 where there is none. Counts it where the record says so.

    logits: [num_rows, vocab_size]. records: int64 [num_rows, 10]. positions: int64 [num_rows]. All on the CPU.
    """
    tokens = []
    for row, words, position in zip(logits.float(), records, positions.tolist(), strict=True):
        record = SamplingRecord.of(words)
        token = sample_row(ruled_logits(row, record, position), record, position)
        count_chosen(record, token, len(row))
        tokens.append(token)
    return torch.tensor(tokens, dtype=torch.int32)


def count_chosen(record: SamplingRecord, token: int, vocab_size: int) -> None:
    """Count a chosen token in the row's table, if the record says so; -1 stands for none."""
    if record.counts and token >= 0:
        _table(record.words, vocab_size, torch.int32)[token] += 1


def ruled_logits(row: torch.Tensor, record: SamplingRecord, position: int) -> torch.Tensor:
    """Return a row after the rules that name tokens, fp32; +inf for all that are no numbers, before or after."""
    row = row.float()
    is_number = row < math.inf
    logits = row
    if record.biases:
        logits = logits + _table(record.biases, len(row), torch.float32)
    if record.words:
        words = _table(record.words, len(row), torch.int32)
        counts = (words & COUNT_BITS).float()
        taken_off = record.presence * (counts > 0).float() + record.frequency * counts
        repetition = torch.tensor(record.repetition)
        scaled = torch.where(logits < 0, logits * repetition, logits / repetition)
        logits = torch.where((words & (SEEN | COUNT_BITS)) != 0, scaled - taken_off, logits)
        barred = SUPPRESSED | (ENDS if position < record.barred_until else 0)
        barred |= NOT_FIRST if position == record.first_at else 0
        logits = torch.where((words & barred) != 0, -math.inf, logits)
    return torch.where(is_number & (logits < math.inf), logits, math.inf)


def sample_row(logits: torch.Tensor, record: SamplingRecord, position: int) -> int:
    """Return the token of a row whose rules are applied; -1 where there is none."""
    top = logits.max()
    if not -math.inf < float(top) < math.inf:
        return -1
    if record.temperature == 0:
        return int((logits == top).nonzero()[0])
    temperature, point = torch.tensor(record.temperature), philox_uniform(record.seed, position)
    top_k = record.top_k if record.top_k < len(logits) else 0
    if not top_k and record.top_p >= 1 and not record.least_score > LEAST_SCORE:
        return _draw_of_all(logits, temperature, point)
    keys = _bits((logits - top) / temperature) & 0x7FFFFFFF
    last = END_KEY - 1
    if top_k:
        last = min(last, int(keys.sort().values[top_k - 1]))
    if record.top_p < 1:
        if top_k or len(logits) <= FEW_TOKENS:
            total = int(_weights(keys, last).sum())
        else:
            total = 8 * int(_masses(logits, temperature)[0].sum())
        last = _last_before(keys, _weights(keys, last), record.top_p * float(total), last)
    last = min(last, int(_bits(torch.tensor(record.least_score))) & 0x7FFFFFFF)
    weights = _weights(keys, last)
    return _first_past(weights, _target(point, 1.0, int(weights.sum())))


def philox_uniform(seed: int, position: int) -> float:
    """Return the number in [0, 1 - 2**-53] of Philox-4x32-10 for a seed and a position."""
    low = 2**32 - 1
    counter, key = [position & low, position >> 32 & low, 0, 0], [seed & low, seed >> 32 & low]
    for _ in range(10):
        even, odd = 0xD2511F53 * counter[0], 0xCD9E8D57 * counter[2]
        counter = [odd >> 32 ^ counter[1] ^ key[0], odd & low, even >> 32 ^ counter[3] ^ key[1], even & low]
        key = [(key[0] + 0x9E3779B9) & low, (key[1] + 0xBB67AE85) & low]
    return float(counter[0] << 21 ^ counter[1] >> 11) * 2.0**-53


def raise_2_to(x: torch.Tensor, exponent: int) -> torch.Tensor:
    """Return 2**(x + exponent), fp32, for x <= 0; about 2**(exponent - 126) below -126."""
    shift = torch.tensor(12582912.0 + 127.0 + exponent)  # adding it leaves the exponent's bits lowest
    x = x.clamp(min=-126.0)
    shifted = x + shift
    r = x - (shifted - shift)
    square = r * r
    high = (r * 1.3264714507386088e-3 + 9.671513922512531e-3) * square + (
        r * 5.550733953714371e-2 + 0.24022242426872253
    )
    p = high * square + (r * 0.6931470036506653 + 1.0)
    return p * (_bits(shifted) << 23 & 0x7FFFFFFF).to(torch.int32).view(torch.float32)


def _draw_of_all(logits: torch.Tensor, temperature: torch.Tensor, point: float) -> int:
    """Draw a block, then a token in it."""
    masses, shares = _masses(logits, temperature)
    target = _target(point, 1.0, int(masses.sum()))
    block = _first_past(masses, target)
    inside, parts = target - int(masses[:block].sum()), shares[block]
    return block * BLOCK + _first_past(parts, _target(float(inside), float(masses[block]), int(parts.sum())))


def _masses(logits: torch.Tensor, temperature: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the masses of blocks beside each other, and the shares in each, int64 [num_blocks] and [.., BLOCK]."""
    factor = torch.tensor(LOG2E) / temperature
    blocks = torch.nn.functional.pad(logits, (0, -len(logits) % BLOCK), value=-math.inf).view(-1, BLOCK)
    tops = blocks.amax(1)
    lowest = torch.finfo(torch.float32).min
    shares = raise_2_to((blocks - tops.clamp(min=lowest)[:, None]) * factor, SHARE_BITS).to(torch.int64)
    factors = raise_2_to((tops - tops.max()) * factor, 0)
    return (shares.sum(1).double() * factors.double() * 64).to(torch.int64), shares


def _weights(keys: torch.Tensor, last: int) -> torch.Tensor:
    """Return the weights of keys, int64; 0 past `last`."""
    scores = -keys.to(torch.int32).view(torch.float32)
    weights = raise_2_to(scores * LOG2E, WEIGHT_BITS).to(torch.int64)
    return torch.where(keys <= last, weights, 0)


def _last_before(keys: torch.Tensor, weights: torch.Tensor, target: float, last: int) -> int:
    """Return the last of the keys up to `last` that have less than the target before them."""
    ordered, order = keys.sort()
    ends = weights[order].cumsum(0)
    first_equal = torch.searchsorted(ordered, ordered)
    before = torch.where(first_equal > 0, ends[(first_equal - 1).clamp(min=0)], 0)
    stays = (before.double() < target) & (ordered <= last)
    return int(ordered[stays].max()) if bool(stays.any()) else 0


def _first_past(weights: torch.Tensor, target: int) -> int:
    """Return the first whose running sum exceeds the target."""
    return int((weights.cumsum(0) <= target).sum())


def _target(part: float, whole: float, total: int) -> int:
    """Return the place of `part` of `whole` among `total`: below it."""
    return min(int(part / whole * float(total)), total - 1)


def _bits(numbers: torch.Tensor) -> torch.Tensor:
    """Return the bits of fp32 numbers, int64."""
    return numbers.view(torch.int32).to(torch.int64)


def _table(address: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    """Return the table at an address, [size]."""
    room = (ctypes.c_byte * (size * dtype.itemsize)).from_address(address)
    return torch.frombuffer(room, dtype=dtype)
