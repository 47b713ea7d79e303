"""DeviceRows: the state of a device's tables after a call that raised."""

import numpy as np
import pytest
import torch

from kvpage import ops
from kvpage.serving.loop.request import Request
from kvpage.serving.params.sampling import SamplingParams
from kvpage.serving.sampling.device_rows import DeviceRows
from kvpage.serving.sampling.native_rows import GREEDY, ROW

VOCAB = 20


@pytest.mark.parametrize("error", [RuntimeError("the device is lost"), KeyboardInterrupt()], ids=["error", "interrupt"])
def test_a_token_that_was_counted_by_a_call_that_raised_is_not_counted_twice(
    monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    request = Request("one", np.array([3, 5], np.int32), SamplingParams(max_tokens=9, frequency_penalty=0.5), 0)
    rows = DeviceRows([request], np.frombuffer(bytearray(GREEDY), ROW), VOCAB, torch.device("cpu"))
    seen, errors = [], [error]
    tables = request.sampled_row.tables_on(torch.device("cpu"), VOCAB)

    def sample_rows(logits, records, positions, out, memory):
        seen.append(tables.words.clone())
        out.fill_(7)
        tables.words[7] += 1
        if errors:
            raise errors.pop()

    monkeypatch.setattr(ops, "sample_rows", sample_rows)
    logits = torch.zeros(1, VOCAB)
    with pytest.raises(type(error)):
        rows.sample(logits, [0])
    assert rows.sample(logits, [0]).tolist() == [7]
    request.append(7, 0.0)
    rows.sample(logits, [1])
    first, again, after = seen
    assert torch.equal(first, again), "the call begins where the one before it did"
    assert int((after - again)[7]) == 1 and int((after - again).sum()) == 1
