"""DeviceRows: the state of a device's tables after a call that raised."""

import numpy as np
import pytest
import torch

from kvpage import ops
from kvpage.layout.sampling_record import ROW_RULES
from kvpage.ops.cuda import uploads
from kvpage.serving.loop.request import Request
from kvpage.serving.params.sampling import SamplingParams
from kvpage.serving.sampling import device_rows, token_tables
from kvpage.serving.sampling.device_rows import DeviceRows
from kvpage.serving.sampling.native_rows import GREEDY

VOCAB = 20


def test_all_that_goes_to_the_device_goes_by_uploads_that_nobody_waits_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Records and tables: a copy of the host's own memory would wait for the pass under way."""
    sent: list[int] = []

    def upload(arrays, device):
        sent.extend(array.nbytes for array in arrays)
        return uploads.upload(arrays, device)

    for module in (device_rows, token_tables):
        monkeypatch.setattr(module, "upload", upload)
    rules = {"logit_bias": {3: 1.0}, "frequency_penalty": 0.5}
    requests = [
        Request(str(row), np.array([3, 5], np.int32), SamplingParams(max_tokens=9, **fields), 0)
        for row, fields in enumerate([{}, rules])
    ]
    rows = DeviceRows(requests, np.frombuffer(bytearray(GREEDY * 2), ROW_RULES), VOCAB, torch.device("cpu"))
    record_bytes = 2 * 8 * ops.SAMPLING_RECORD_WORDS
    assert sorted(sent) == sorted([record_bytes, 4 * VOCAB, 4 * VOCAB]), "the records, and a row's words and biases"
    assert rows.records.shape == (2, ops.SAMPLING_RECORD_WORDS) and rows.records.dtype == torch.int64
    rows.hold([0, 0])
    assert len(sent) == 4, "the words, once they hold tokens"


@pytest.mark.parametrize("error", [RuntimeError("the device is lost"), KeyboardInterrupt()], ids=["error", "interrupt"])
def test_a_token_that_was_counted_by_a_call_that_raised_is_not_counted_twice(
    monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    request = Request("one", np.array([3, 5], np.int32), SamplingParams(max_tokens=9, frequency_penalty=0.5), 0)
    rows = DeviceRows([request], np.frombuffer(bytearray(GREEDY), ROW_RULES), VOCAB, torch.device("cpu"))
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
