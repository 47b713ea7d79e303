"""The numbers by which `kvpage.ops.sample_rows` chooses one row's token."""

import numpy as np

SAMPLING_RECORD = np.dtype(
    [
        ("seed", np.uint64),
        ("words", np.int64),  # the address of the row's table of words, int32 [vocab_size]; 0: none
        ("biases", np.int64),  # the address of its table of biases, fp32 [vocab_size]; 0: none
        ("top_p", np.float64),  # 1: all
        ("top_k", np.int64),  # 0: all
        ("temperature", np.float32),  # 0: the likeliest token is taken
        ("least_score", np.float32),  # the logarithm of min_p; -inf: all
        ("repetition", np.float32),  # 1: none
        ("presence", np.float32),
        ("frequency", np.float32),
        ("counts", np.int32),  # whether the chosen token is counted in the words
        ("barred_until", np.int64),  # the first position at which the sequence may end
        ("first_at", np.int64),  # the position of the first token
    ]
)
"""A row's numbers, as kernels/sampling_rules.py has them. All zeros but top_p and repetition, 1, for a greedy row."""

RECORD_WORDS = SAMPLING_RECORD.itemsize // 8
"""The number of int64 in a record of `sample_rows`."""
