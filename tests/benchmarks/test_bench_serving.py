"""What bench_serving counts and compares: turns, the least to compute, shared caches, ties, products, kvpage's peer."""

import copy
import io
import json
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from kvpage.benchmarks import kvpage_peer, serving_bound, serving_tokens  # noqa: E402
from kvpage.benchmarks.serving_contenders import (  # noqa: E402
    KVPageServer,
    local_contenders,
    num_tokens_of,
    prefill,
    shared_copy,
)
from kvpage.benchmarks.serving_workloads import (  # noqa: E402
    BATCHED_TOKENS,
    Served,
    Shape,
    Workload,
    batches_of,
    converse,
    make_model,
    make_workload,
)

TINY = Shape(2, 32, 64, 2, 1)


@pytest.fixture(scope="module")
def model():
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield make_model(TINY, torch.float32, vocab=64)
    torch.set_num_threads(num_threads)


def test_a_turn_follows_all_that_was_before() -> None:
    asked: list[list[list[int]]] = []

    def answer(prompts):
        asked.append(prompts)
        return [[90 + len(asked)] for _ in prompts], 0.5

    served = converse(Workload("multi-turn", [[[1], [2, 2]], [[3], [4]]]), answer)
    assert asked == [[[1], [2, 2]], [[1, 91, 3], [2, 2, 91, 4]]]
    assert served == Served([[[91], [91]], [[92], [92]]], 1.0)


@pytest.mark.parametrize("num", [1, BATCHED_TOKENS - 1, BATCHED_TOKENS, BATCHED_TOKENS + 1])
def test_batches_are_full_but_the_last(num: int) -> None:
    batches = batches_of(Workload("separate", [[list(range(num))]]), max_tokens=3)
    assert sum(size for size, _ in batches) == num + 2
    assert all(0 < size <= BATCHED_TOKENS for size, _ in batches) and [wanted for _, wanted in batches[-3:]] == [1] * 3


def test_a_shared_prefix_is_computed_once_and_a_last_token_with_the_next_turn() -> None:
    assert batches_of(Workload("shared", [[[1, 2, 3], [1, 2, 4]]], 2), max_tokens=1) == [(4, 2)]
    assert batches_of(Workload("multi-turn", [[[1, 2]], [[3, 4]]]), max_tokens=1) == [(2, 1), (3, 1)]


@pytest.mark.parametrize("name", ["separate", "shared", "multi-turn"])
def test_all_ways_answer_alike(name: str, model) -> None:
    """Each twice: the second time nothing of the first is left in its way. The slow generate_batch is in test_bench."""
    workload = make_workload(name, 2, 20, 9, 2, vocab=64)
    ways = local_contenders(model, workload, max_tokens=3)
    ways.pop("generate_batch", None)
    found = {way: run() for way, run in ways.items()}
    compared = serving_tokens.compare_answers(serving_tokens.TokenJudge(model), workload, found)
    assert compared.keys() == ways.keys() and all(one.max_gap < 1e-4 for one in compared.values())
    assert {way: run().answers for way, run in ways.items()} == {way: one.answers for way, one in found.items()}


def test_a_shared_cache_is_left_as_it_was(model) -> None:
    cache = prefill(model, [1, 2, 3])
    keys = [layer.keys.clone() for layer in cache.layers]
    model.generate(torch.tensor([[1, 2, 3, 4]]), past_key_values=shared_copy(cache), max_new_tokens=3, do_sample=False)
    assert cache.get_seq_length() == 3
    assert all(torch.equal(layer.keys, before) for layer, before in zip(cache.layers, keys, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_wrong_tokens_of_kvpage_are_refused_and_those_of_others_shown(dtype: torch.dtype) -> None:
    model = make_model(TINY, dtype, vocab=64)
    workload = Workload("separate", [[[1, 2], [3]]])
    logits = copy.deepcopy(model).float()(torch.tensor([[1, 2]])).logits[0, -1]
    best, worst = int(logits.argmax()), int(logits.argmin())
    right, wrong = Served([[[best], [5]]], 1.0), Served([[[worst], [5]]], 1.0)
    gap = float(logits.max() - logits.min())
    judge = serving_tokens.TokenJudge(model)
    assert 0 < judge.max_rounding < gap / 10
    compared = serving_tokens.compare_answers(judge, workload, {"kvpage": right, "other": wrong})
    assert compared == {"kvpage": (0, 0.0), "other": (1, pytest.approx(gap, rel=1e-5))}
    with pytest.raises(SystemExit, match="kvpage is .* below the best logit"):
        serving_tokens.compare_answers(judge, workload, {"kvpage": wrong, "other": right})


def test_later_turns_of_a_conversation_that_parted_are_not_compared() -> None:
    workload = Workload("multi-turn", [[[1, 2]], [[3]], [[4]]])
    ours = Served([[[7, 7]], [[5, 6]], [[1, 1]]], 1.0)
    theirs = Served([[[7, 7]], [[5, 8]], [[2, 1]]], 1.0)
    assert serving_tokens.parted_tokens(workload, theirs, ours) == [([1, 2, 7, 7, 3, 5], 8, 6)]
    assert serving_tokens.parted_tokens(workload, ours, ours) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", serving_bound.CANDIDATES)
def test_candidates_of_the_bound_compute_the_product(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    weight, rows = torch.randn(48, 32).to(dtype), torch.randn(5, 32).to(dtype)
    try:
        with torch.no_grad():
            found = serving_bound.CANDIDATES[name](weight, 5)(rows)
    except (RuntimeError, AttributeError):
        pytest.skip(f"{name} is not here for {dtype}")
    want = rows.double() @ weight.double().T
    torch.testing.assert_close(found.double(), want, rtol=2e-2, atol=1e-4 if dtype == torch.float32 else 0.2)


def test_the_bound_has_all_products_of_the_model(model) -> None:
    layers, last = serving_bound.weights_of(model)
    assert sorted({tuple(weight.shape) for each in layers for weight in each}) == [
        (32, 32),
        (32, 64),
        (64, 32),
        (128, 32),
    ]
    assert [len(each) for each in layers] == [TINY.layers] * 4 and last is not None
    num = sum(weight.numel() for each in layers for weight in each)
    assert num == sum(one.weight.numel() for name, one in model.named_modules() if name.endswith("_proj"))
    bound = serving_bound.ProductsBound(model, [(4, 0), (3, 2), (2, 2)], rounds=1)
    bound.run()
    assert set(bound.chosen.values()) <= set(serving_bound.CANDIDATES)


def test_a_kvpage_of_its_own_process(model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    """It answers line by line what the same server answers here."""
    model.save_pretrained(tmp_path)
    workload = make_workload("separate", 2, 0, 0, 1, vocab=64)
    lines = [{"num_tokens": num_tokens_of(workload, 3)}]
    lines += [{"prompts": workload.turns[0], "max_tokens": 3, "is_first": True}] * 2
    monkeypatch.setattr("sys.stdin", io.StringIO("".join(json.dumps(line) + "\n" for line in lines)))
    monkeypatch.setattr("sys.argv", ["kvpage_peer.py", str(torch.get_num_threads()), str(tmp_path), "float32"])
    kvpage_peer.main()
    hello, ready, *answers = map(json.loads, capsys.readouterr().out.splitlines())
    assert set(hello) == {"kvpage"} and ready == {}
    want = KVPageServer(model, num_tokens_of(workload, 3)).answer(workload.turns[0], 3)
    assert [answer["tokens"] for answer in answers] == [want, want]
