"""What is checked of gather_cache's lengths on the device and of the output they need: all but what lies in memory.

The host's memory stands for the device's here; what the kernel does with them is tested in test_triton_lengths.py.
"""

import pytest
import torch

from kvpage import CacheLayout
from kvpage.ops.args.tokens import check_device_lengths, check_open_out

LAYOUT = CacheLayout(4, 3, 10, torch.float32)
CACHE = torch.zeros(LAYOUT.shape(4))
ROWS = torch.zeros(12, 3, 10)


def test_good_lengths_come_back_contiguous():
    lengths, starts = check_device_lengths(torch.arange(6)[::2], torch.arange(3, dtype=torch.int32), 3, CACHE)
    assert lengths.tolist() == [0, 2, 4] and lengths.is_contiguous() and starts.tolist() == [0, 1, 2]
    assert check_device_lengths(torch.arange(3), None, 3, CACHE)[1] is None


@pytest.mark.parametrize(
    "match, lengths, starts",
    [
        ("seq_lens.shape must be .3,., got .2,.", torch.arange(2), None),
        ("seq_lens.shape", torch.arange(3)[None], None),
        ("seq_lens.dtype must be torch.int32 or torch.int64, got torch.float32", torch.zeros(3), None),
        ("seq_lens must be on cpu, got meta", torch.arange(3, device="meta"), None),
        ("seq_starts must be on cpu as seq_lens are, got list", torch.arange(3), [0, 0, 0]),
        ("seq_starts.shape", torch.arange(3), torch.arange(4)),
        ("seq_starts.dtype", torch.arange(3), torch.zeros(3, dtype=torch.int16)),
    ],
)
def test_bad_lengths_are_refused(match, lengths, starts):
    with pytest.raises(ValueError, match=match):
        check_device_lengths(lengths, starts, 3, CACHE)


def test_good_outputs():
    padded = torch.zeros(2, 5, 3, 10)
    for out in ((ROWS, ROWS[..., :7]), (padded, padded[..., :1])):
        assert check_open_out(out, 2, True, CACHE, LAYOUT) is out


@pytest.mark.parametrize(
    "match, out",
    [
        ("out must be given", None),
        ("out's value must be given", (ROWS, None)),
        ("key must have 3 or 4 dimensions", (ROWS[0], ROWS)),
        ("value must have 3 or 4 dimensions", (ROWS, ROWS[0])),
        ("value.shape must be .12, 3, 10., got .11, 3, 10.", (ROWS, ROWS[:11])),
        ("key.shape must be .2, 5, 3, 10., got .3, 5, 3, 10.", (torch.zeros(3, 5, 3, 10), ROWS)),
        ("value.shape", (torch.zeros(2, 5, 3, 10), torch.zeros(2, 6, 3, 10))),
        ("value.shape", (torch.zeros(2, 6, 3, 10), ROWS)),
        ("key.shape", (torch.zeros(12, 2, 10), ROWS)),
        ("value.dtype", (ROWS, ROWS.half())),
        ("key.dtype", (ROWS.half(), ROWS)),
        ("head size must be in .1, 10., got 11", (torch.zeros(12, 3, 11), ROWS)),
        ("contiguous in its last dimension", (torch.zeros(12, 3, 20)[..., ::2], ROWS)),
        ("must be on cpu, got meta", (ROWS, ROWS.to("meta"))),
        ("memory for each of its elements", (ROWS, torch.zeros(1, 3, 10).expand(12, 3, 10))),
    ],
)
def test_bad_outputs_are_refused(match, out):
    with pytest.raises(ValueError, match=match):
        check_open_out(out, 2, True, CACHE, LAYOUT)
