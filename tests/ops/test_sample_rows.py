"""ops.sample_rows on a CPU, eager and compiled, and its reference: the tokens that the serving loop chooses."""

import numpy as np
import pytest
import torch
from support.sampled_rows import NAMING_RULES, RULES, make_logits, make_request, sampling_records

from kvpage import _C, ops
from kvpage.ops import reference
from kvpage.serving.sampling.device_rows import DeviceRows
from kvpage.serving.sampling.sampler import Sampler, sample

CPU = torch.device("cpu")


def device_rows(requests, vocab_size):
    return DeviceRows(requests, Sampler(requests).records, vocab_size, CPU)


def exact_tokens(logits, requests):
    """The reference's."""
    rows, positions = device_rows(requests, logits.shape[1]), [request.num_generated for request in requests]
    rows.hold(positions)
    return reference.sample_rows(logits, rows.records, torch.tensor(positions)).tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("vocab_size", [1, 2, 255, 256, 257, 4096, 4097, 9001])
def test_tokens_are_the_references(vocab_size, dtype):
    logits = make_logits(len(RULES), vocab_size, vocab_size).to(dtype)
    requests = [make_request(31 * vocab_size + row, row % 3, **fields) for row, fields in enumerate(RULES)]
    assert sample(logits, requests) == exact_tokens(logits, requests)
    assert device_rows(requests, vocab_size).sample(logits, [row % 3 for row in range(len(RULES))]).tolist() == sample(
        logits, requests
    )


def test_many_points_of_one_distribution():
    """Many tokens are about as likely, and some equally: a sum that rounds would give another one at times."""
    logits = make_logits(10, 300, 4)[1:2].expand(40, 300)
    for number, fields in enumerate(RULES[1:]):
        requests = [make_request(1000 * number + seed, **fields) for seed in range(40)]
        assert sample(logits, requests) == exact_tokens(logits, requests)


def test_every_instruction_set_gives_the_references_tokens():
    logits = make_logits(len(RULES), 5003, 6)
    requests = [make_request(row, 1, **fields) for row, fields in enumerate(RULES)]
    rows, want = Sampler(requests).records, exact_tokens(logits, requests)
    rows["position"] = 1
    place, found = (logits.data_ptr(), 4 * 5003, 0, *logits.shape), np.empty(len(rows), np.int32)
    for kernel in _C.sampling_kernels():
        _C.sample_rows(place, rows, [], [], found, 1, kernel)
        assert found.tolist() == want, kernel


def test_rules_that_name_tokens():
    """As sequences grow: the tables count what was chosen."""
    vocab_size, rng = 40, np.random.default_rng(0)
    prompts = rng.integers(0, vocab_size, (len(NAMING_RULES), 6))
    requests = [make_request(seed, 0, prompts[seed], **fields) for seed, fields in enumerate(NAMING_RULES)]
    on_tables = device_rows(requests, vocab_size)
    for step in range(6):
        logits = make_logits(len(requests), vocab_size, step)
        logits[:, 7:14] = 1.5
        tokens = sample(logits, requests)
        assert on_tables.sample(logits, [step] * len(requests)).tolist() == tokens == exact_tokens(logits, requests)
        for request, token in zip(requests, tokens, strict=True):
            request.append(token, 0.0)


@pytest.mark.parametrize("rules", [{}, {"temperature": 1.0}, {"temperature": 1.0, "top_k": 3, "suppress_tokens": [1]}])
def test_rows_without_a_token_to_choose(rules):
    logits = torch.zeros(7, 300)
    logits[1, 299], logits[2, 17], logits[3, 256], logits[4] = torch.nan, -torch.nan, torch.inf, -torch.inf
    logits[5, 1] = torch.nan
    requests = [make_request(row, **rules) for row in range(6)]
    requests.append(make_request(6, suppress_tokens=range(300)))
    found, want = device_rows(requests, 300).sample(logits, [0] * 7), exact_tokens(logits, requests)
    assert found.tolist() == want and want[1:] == [-1] * 6 and want[0] >= 0


def test_no_row_and_a_row_in_a_wider_tensor():
    out = torch.full((0,), -9, dtype=torch.int32)
    ops.sample_rows(torch.zeros(0, 5), sampling_records(0), torch.zeros(0, dtype=torch.int64), out)
    wide, out, positions = make_logits(4, 900, 2), torch.full((4,), -9, dtype=torch.int32), torch.arange(4)
    ops.sample_rows(wide[:, 7:800], sampling_records(4), positions, out)
    assert out.tolist() == reference.sample_rows(wide[:, 7:800].clone(), sampling_records(4), positions).tolist()


@torch.no_grad()
def test_compiled_code_chooses_the_same_tokens():
    torch._dynamo.reset()
    records, positions = sampling_records(3, temperature=[0, 0.7, 1.3], top_k=[0, 0, 20]), torch.arange(3)

    def step(hidden, weight, out):
        ops.sample_rows(hidden @ weight, records, positions, out)
        return out + 1

    for seed in range(3):
        torch.manual_seed(seed)
        hidden, weight = torch.randn(3, 8), torch.randn(8, 500)
        outs = torch.full((2, 3), -9, dtype=torch.int32)
        found = torch.compile(step, fullgraph=True, backend="aot_eager")(hidden, weight, outs[0])
        assert torch.equal(found, step(hidden, weight, outs[1])) and torch.equal(*outs)
        assert outs[0].tolist() == reference.sample_rows(hidden @ weight, records, positions).tolist()


def test_memory_in_compiled_code():
    """A CPU needs none, and checks what it is given, as a device does."""
    logits, positions = torch.randn(2, 300), torch.zeros(2, dtype=torch.int64)
    memory, out = ops.SamplingMemory.make(2, 300, "cpu"), torch.full((2,), -9, dtype=torch.int32)
    tensors = memory.tops, memory.shares, memory.lists, memory.held
    operation = torch.ops.kvpage.sample_rows
    with pytest.raises(ValueError, match="memory must be all of tops, shares, lists and held, for rows, got 3 of them"):
        operation(logits, sampling_records(2), positions, out, *tensors[:3])
    with pytest.raises(ValueError, match="lists must be contiguous torch.int32"):
        operation(logits, sampling_records(2), positions, out, *tensors[:2], memory.lists[:, :-1], memory.held)
    with pytest.raises(ValueError, match="memory must be for 2 rows of 300 logits on cpu"):
        operation(logits, sampling_records(2), positions, out, *(tensor[:1] for tensor in tensors))
    assert (out == -9).all()
    operation(logits, sampling_records(2), positions, out, *tensors)
    assert out.tolist() == reference.sample_rows(logits, sampling_records(2), positions).tolist()


@pytest.mark.parametrize(
    "changed, message",
    [
        ({"temperature": -1.0}, "temperature must be finite and not negative, got -1 in row 0"),
        ({"temperature": np.nan}, "temperature must be finite"),
        ({"top_k": -1}, "top_k must not be negative, got -1 in row 0"),
        ({"top_p": 0.0}, r"top_p must be in \(0, 1\], got 0 in row 0"),
        ({"least_score": 0.5}, "least_score must be at most 0"),
        ({"counts": 1}, "records must have a table of words where tokens are counted, got none in row 0"),
    ],
    ids=str,
)
def test_numbers_out_of_range_are_refused(changed, message):
    out = torch.full((2,), -9, dtype=torch.int32)
    logits, positions = torch.zeros(2, 9), torch.zeros(2, dtype=torch.int64)
    with pytest.raises(ValueError, match=message):
        ops.sample_rows(logits, sampling_records(2, **changed), positions, out)
    with pytest.raises(ValueError, match="position must not be negative, got -1 in row 1"):
        ops.sample_rows(logits, sampling_records(2), torch.tensor([0, -1]), out)
    assert (out == -9).all()


def test_arguments_that_do_not_fit_are_refused():
    logits, records, positions = torch.zeros(2, 9), sampling_records(2), torch.zeros(2, dtype=torch.int64)
    out, memory = torch.full((2,), -9, dtype=torch.int32), ops.SamplingMemory.make(2, 9, "cpu")
    shared = torch.full((1,), -9, dtype=torch.int32).expand(2)
    for name, args, error in [
        ("logits", (logits.T, records, positions, out), ValueError),
        ("logits", (logits.double(), records, positions, out), ValueError),
        ("logits", (logits[0], records, positions, out), ValueError),
        ("logits", (logits[:, :0], records, positions, out), ValueError),
        ("logits", (torch._neg_view(logits), records, positions, out), ValueError),
        ("logits", (None, records, positions, out), TypeError),
        ("records", (logits, records[:1], positions, out), ValueError),
        ("records", (logits, records.int(), positions, out), ValueError),
        ("records", (logits, [0, 1], positions, out), TypeError),
        ("positions", (logits, records, positions.int(), out), ValueError),
        ("out", (logits, records, positions, out.long()), ValueError),
        ("out", (logits, records, positions, shared), ValueError),
        ("memory", (logits, records, positions, out, 3), TypeError),
        ("memory", (logits, records, positions, out, ops.SamplingMemory.make(2, 8, "cpu")), ValueError),
    ]:
        with pytest.raises(error, match=f"^{name} must"):
            ops.sample_rows(*args)
    assert (out == -9).all()
    ops.sample_rows(logits, records, positions, out, memory)
    assert (out >= 0).all()
