"""Decoding over latents as compiled for a GPU: how often each latent is read, and what comes out."""

import numpy as np
import pytest
import torch
from support.attention_cases import BF16, HUGE, attend, expected, make_case
from support.ptx.archs import every_case
from support.ptx.machine.async_copies import AsyncCopies

LENGTHS = [
    300,
    1,
    15,
    16,
    17,
    31,
    32,
    33,
    5,
]  # the first is split; blocks have 16 keys and tiles 32; the last one: none
CASES = {  # heads, how often each latent is read: by one thread block of at most 64 heads, or by two neighbours
    "16 heads": ([90], 16, 1),
    "64 heads": ([80, 90], 64, 1),
    "128 heads": ([90], 128, 2),
}


@pytest.fixture
def copied(monkeypatch):
    """Addresses and bytes of all copies from global to shared memory."""
    found, issue = [], AsyncCopies.issue

    def noted(copies, lanes, places, addresses, num_bytes, wanted, what):
        found.append((addresses.copy(), np.array(wanted)))
        issue(copies, lanes, places, addresses, num_bytes, wanted, what)

    monkeypatch.setattr(AsyncCopies, "issue", noted)
    return found


def reads_of(tensor, copied):
    """How often each 8 bytes of the tensor were copied."""
    start, counts = tensor.data_ptr(), np.zeros(tensor.nbytes // 8, int)
    for addresses, wanted in copied:
        for half in (0, 8):
            offset = addresses.astype(np.int64) - start + half
            np.add.at(counts, offset[(wanted > half) & (offset >= 0) & (offset < tensor.nbytes)] // 8, 1)
    return counts


@every_case("heads, times", CASES)
def test_each_latent_is_read_once(device, cpu_as_device, copied, heads, times):
    case = make_case(LENGTHS, None, ("mla", "NHD"), dtype=BF16, group=heads, size=576, value_size=512, block=16)
    want = expected(case)
    case |= {"max_seq_len": 300, "max_query_len": 1}
    case["seq_lens"][-1], case["block_tables"][-1] = 0, HUGE
    got, reported = attend("interpreter", case, multiprocessors=1000, capability=device.arch, state=cpu_as_device)
    assert not reported and (got[-1] == 0).all()
    torch.testing.assert_close(got[:-1], want[:-1], rtol=1.6e-2, atol=1.6e-2)
    rows = torch.zeros(case["cache"].shape[:2], dtype=int)
    for table, length in zip(case["block_tables"], case["seq_lens"].tolist(), strict=True):
        rows[table[torch.arange(length) // 16].long(), torch.arange(length) % 16] = times
    counts = reads_of(case["cache"], copied).reshape(*rows.shape, -1)
    assert (counts == rows.numpy()[:, :, None]).all()
    by_groups = any(each.opcode == "wgmma" for each in device.last["paged_attention_kernel"].entry.instructions)
    assert by_groups == (device.arch == 90 and heads >= 64)
