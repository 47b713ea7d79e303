"""The record of a row of logits: the numbers by which its token is chosen, on every device.

    SamplingRecord ─┬─► SAMPLING_RECORD   all of them, where a device reads them     kernels/sampling_rules.py
                    └─► ROW_RULES         those of the draw, with the position       csrc/sampling/row_rules.h

Names, types, places in memory and a greedy row's values are declared here alone. The kernels take the places from here.
The extension is compiled with its own, which are compared when kvpage is imported.
"""

from typing import Annotated, NamedTuple, get_type_hints

import numpy as np
import torch

Address = Annotated[int, np.int64]
Int64 = Annotated[int, np.int64]
Int32 = Annotated[int, np.int32]
UInt64 = Annotated[int, np.uint64]
Float64 = Annotated[float, np.float64]
Float32 = Annotated[float, np.float32]


class SamplingRecord(NamedTuple):
    """The numbers of one row. By default its likeliest token is taken, and no rule names tokens."""

    seed: UInt64 = 0
    words: Address = 0  # of the row's table of words, int32 [vocab_size]; 0: none
    biases: Address = 0  # of its table of biases, fp32 [vocab_size]; 0: none
    top_p: Float64 = 1.0  # 1: all
    top_k: Int64 = 0  # 0: all
    temperature: Float32 = 0.0  # 0: the likeliest token is taken
    least_score: Float32 = -np.inf  # the logarithm of min_p; -inf: all
    repetition: Float32 = 1.0  # 1: none
    presence: Float32 = 0.0
    frequency: Float32 = 0.0
    counts: Int32 = 0  # whether the chosen token is counted in the words
    barred_until: Int64 = 0  # the first position at which the sequence may end
    first_at: Int64 = -1  # the position of the first token

    @classmethod
    def of(cls, words: torch.Tensor) -> "SamplingRecord":
        """Return the numbers of a record on the CPU, int64 [RECORD_WORDS]."""
        return cls(*words.numpy().view(SAMPLING_RECORD)[0].item())


_KINDS = {name: hint.__metadata__[0] for name, hint in get_type_hints(SamplingRecord, include_extras=True).items()} | {
    "position": np.int64
}  # of the draw: how many tokens were generated before

SAMPLING_RECORD = np.dtype([(name, _KINDS[name]) for name in SamplingRecord._fields])
"""The bytes of a record of `kvpage.ops.sample_rows`."""

RECORD_WORDS = SAMPLING_RECORD.itemsize // 8
"""The number of int64 in such a record."""

DRAW = ("seed", "top_k", "top_p", "temperature", "least_score")
"""The numbers of a record that the draw needs. The others belong to rules that name tokens."""

ROW_RULES = np.dtype([(name, _KINDS[name]) for name in (DRAW[0], "position", *DRAW[1:])])
"""A row's numbers as the extension takes them: RowRules in csrc/sampling/row_rules.h."""

# A word of a row's table says what holds for a token. Its other bits are how often the token was generated.
COUNT_BITS = (1 << 27) - 1
SUPPRESSED, ENDS, NOT_FIRST, SEEN = (1 << bit for bit in (27, 28, 29, 30))


def word_of(*names: str) -> int:
    """Return the place of a field in a record, in words of 64 bits.

    Args:
        names: The field, of 64 bits; or the two fields of 32 bits that share a word, the low one first.

    Raises:
        ValueError: The fields do not make up a word.
    """
    places = [SAMPLING_RECORD.fields[name] for name in names]  # type: ignore[index]  # a dtype with fields
    begin, sizes = places[0][1], [kind.itemsize for kind, *_ in places]
    follows = len(names) == 1 or places[1][1] == begin + sizes[0]
    if begin % 8 or sum(sizes) != 8 or not follows:
        raise ValueError(f"fields must make up a word of 64 bits, got {', '.join(names)}")
    return int(begin) // 8
