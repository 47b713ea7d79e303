"""The kernels that choose tokens, as the sampler calls them: the tokens of the CPU, from the same bits of logits."""

import contextlib

import numpy as np
import pytest
import torch
from support.kernel_calls import INTERPRETED, ON_KERNELS
from support.sampled_rows import NAMING_RULES, RULES, make_logits, make_request

pytest.importorskip("triton")

from kvpage import ops  # noqa: E402
from kvpage.ops.cuda import sampling as cuda_sampling  # noqa: E402
from kvpage.serving.sampling import sampler  # noqa: E402
from kvpage.serving.sampling.logits_check import LogitsNotFinite  # noqa: E402


@pytest.fixture
def on_device(monkeypatch):
    """Have the sampler take tensors of the CPU for those of a device, which the interpreter serves."""
    if not INTERPRETED:
        return lambda: contextlib.nullcontext()

    @contextlib.contextmanager
    def patched():
        with monkeypatch.context() as patch:
            patch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
            patch.setattr(sampler, "can_sample", lambda logits: False)
            patch.setattr(ops, "can_sample_rows", lambda logits: True)
            patch.setattr(cuda_sampling, "runs_on_host", lambda logits: False)
            yield

    return patched


def check(where, on_device, logits, requests):
    """The kernels' tokens are those of the CPU."""
    want = sampler.sample(logits, requests)
    with on_device():
        assert sampler.sample(logits.cuda() if where == "cuda" else logits, requests) == want
    return want


@ON_KERNELS
@pytest.mark.parametrize("vocab_size", [1, 2, 127, 128, 129, 700])
def test_tokens_are_those_of_the_cpu(where, on_device, vocab_size):
    rules = RULES if vocab_size > 100 else RULES[::3]
    requests = [make_request(7 * vocab_size + row, row % 3, **fields) for row, fields in enumerate(rules)]
    check(where, on_device, make_logits(len(rules), vocab_size, vocab_size), requests)


@ON_KERNELS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_logits_and_rows_of_a_wider_tensor(where, on_device, dtype):
    logits = make_logits(5, 1500, 3).to(dtype)[:, 8:1409]
    check(where, on_device, logits, [make_request(row, **RULES[2 * row]) for row in range(5)])


@ON_KERNELS
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"temperature": 1.0},
        {"temperature": 1.0, "top_p": 0.6},
        {"temperature": 25.0, "top_p": 0.9},
        {"temperature": 8.0, "top_k": 1500, "top_p": 0.9, "min_p": 0.01},
    ],
    ids=["greedy", "all", "nucleus", "many in the nucleus", "large top_k"],
)
def test_vocabularies_of_many_blocks(where, on_device, fields):
    """More tokens stay than are held at once, and fewer."""
    logits = make_logits(3, 32_000 if not fields or len(fields) == 1 else 9_001, 5)[2:]
    check(where, on_device, logits, [make_request(11, 2, **fields)])


@ON_KERNELS
def test_equally_likely_tokens_stay_together(where, on_device):
    """As many as a whole vocabulary of them, where only two are asked for."""
    logits = torch.zeros(1, 1100)
    logits[0, 5] = 1.0
    assert check(where, on_device, logits, [make_request(0, temperature=1.0, top_k=2, top_p=0.9999)]) != [5]


@ON_KERNELS
def test_rules_that_name_tokens_as_sequences_grow(where, on_device):
    """Counted by the kernel; and again from the start, where a token is taken back or another one comes."""
    vocab_size, rng = 40, np.random.default_rng(0)
    prompts = rng.integers(0, vocab_size, (len(NAMING_RULES), 6))
    requests = [make_request(seed, 0, prompts[seed], **fields) for seed, fields in enumerate(NAMING_RULES)]
    tables = {}
    for step in range(6):
        logits = make_logits(len(requests), vocab_size, step)
        logits[:, 7:14] = 1.5
        tokens = check(where, on_device, logits, requests)
        for request, token in zip(requests, tokens, strict=True):
            request.tokens[request.num_tokens] = rng.integers(0, vocab_size) if step == 3 else token
            request.num_tokens += -1 if step == 4 else 1
        held = {request: request.sampled_row.tables_on(logits.device, vocab_size) for request in requests}
        assert where == "cuda" or all(held[each] is tables.get(each, held[each]) for each in requests)
        tables = held


@ON_KERNELS
def test_rows_without_a_token_to_choose(where, on_device):
    logits = torch.zeros(7, 300)
    logits[1, 299], logits[2, 17], logits[3, 256], logits[4] = torch.nan, -torch.nan, torch.inf, -torch.inf
    requests = [make_request(row, temperature=float(row % 2)) for row in range(5)]
    requests += [make_request(5, suppress_tokens=range(300)), make_request(6, temperature=1.0, logit_bias={1: 2.0})]
    with on_device(), pytest.raises(LogitsNotFinite) as error:
        sampler.sample(logits.cuda() if where == "cuda" else logits, requests)
    assert error.value.rows == [1, 2, 3, 4, 5]


@ON_KERNELS
def test_arguments_that_do_not_fit_are_refused(where, on_device):
    device = torch.device("cuda" if where == "cuda" else "cpu")
    logits, positions = torch.zeros(2, 9, device=device), torch.zeros(2, dtype=torch.int64, device=device)
    records = torch.zeros(2, ops.SAMPLING_RECORD_WORDS, dtype=torch.int64, device=device)
    out, memory = torch.full((2,), -9, dtype=torch.int32, device=device), ops.SamplingMemory.make(2, 9, device)
    for name, args in {
        "logits": (logits.T, records, positions, out, memory),
        "records": (logits, records[:1], positions, out, memory),
        "positions": (logits, records, positions.int(), out, memory),
        "out": (logits, records, positions, out.long(), memory),
        "memory": (logits, records, positions, out, ops.SamplingMemory.make(1, 9, device)),
    }.items():
        with pytest.raises(ValueError, match=f"^{name} must be"):
            ops.sample_rows(*args)
    assert (out == -9).all() and ops.SAMPLING_RECORD.itemsize == 8 * ops.SAMPLING_RECORD_WORDS
    with pytest.raises(ValueError, match="logits must have at most 65535 rows, got 65536"):
        ops.sample_rows(torch.zeros(1, 9, device=device).expand(1 << 16, 9), records, positions, out, memory)
    with pytest.raises(ValueError, match="num_rows must be positive, got 0"):
        ops.SamplingMemory.make(0, 9, device)


@ON_KERNELS
def test_tokens_that_stay_on_the_device_are_the_same(where, on_device):
    """Of rows whose rules count no tokens, at positions that the sequences have not reached."""
    requests = [make_request(seed, 2 + seed % 3, **fields) for seed, fields in enumerate(RULES)]
    requests.append(make_request(99, 2, temperature=1.0, suppress_tokens=[3, 5], logit_bias={7: 4.0}))
    logits = make_logits(len(requests), 700)
    ahead = np.array([request.num_generated + 1 for request in requests], np.int64)
    want = sampler.Sampler(requests).sample(logits, ahead)
    with on_device():
        chosen = sampler.Sampler(requests)
        there = logits.cuda() if where == "cuda" else logits
        assert not chosen.needs_tokens and chosen.begin(there, ahead).tolist() == want.tolist()
    assert sampler.Sampler([make_request(1, temperature=1.0, presence_penalty=0.5)]).needs_tokens
    assert sampler.Sampler([make_request(1, temperature=1.0, no_repeat_ngram_size=2)]).needs_tokens
    assert not sampler.Sampler([make_request(1)]).needs_tokens
