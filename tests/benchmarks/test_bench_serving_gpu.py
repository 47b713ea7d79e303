"""What bench_serving_gpu computes: moments of tokens, the bytes of its bound, and a model that is as it was before."""

import types

import pytest

torch = pytest.importorskip("torch")
tf = pytest.importorskip("transformers")

from kvpage.benchmarks import bench_serving_gpu as bench  # noqa: E402
from kvpage.benchmarks.bench_serving_gpu import Moments, serve_kvpage  # noqa: E402
from kvpage.benchmarks.serving_step_bound import StepBound, copy_bandwidth, kv_bytes, step_bound, weight_bytes  # noqa: E402
from kvpage.serving import SamplingParams  # noqa: E402


@pytest.fixture(scope="module")
def model():
    return bench.make_model("tiny", "cpu")


def test_moments_of_two_requests():
    moments = Moments([[1, 2, 3], [4, 5]], 10.0, [[10.5, 11.0, 12.0], [11.0, 11.25]])
    found = moments.summary()
    assert found["tokens/s"] == 5 / 2.0
    assert found["ttft ms"] == 750 and found["between ms"] == 500
    assert found["between p99 ms"] == pytest.approx(990)


def test_one_token_each_has_no_time_between():
    assert Moments([[1]], 0.0, [[0.5]]).summary()["between ms"] == 0


def test_the_bound_has_the_model_once_and_the_bytes_of_all_tokens(model):
    shape = bench.SHAPES["tiny"]
    assert kv_bytes(model.config, 10, torch.float32) == 10 * 2 * shape["num_hidden_layers"] * 16 * 4
    bound = step_bound(model, 2, 5, bandwidth=1e6)
    assert bound.attention == kv_bytes(model.config, 10, torch.float32) / 1e6 and bound.model > 0
    assert bound.weights == sum(weight.nbytes for weight in model.parameters()) / 1e6
    assert StepBound(2.0, 4.0, 1.0).seconds == 6.0 and StepBound(2.0, 4.0, 1.0).bytes == 5.0
    assert copy_bandwidth(torch.device("cpu"), 1 << 12) > 0


def test_an_embedding_counts_where_it_is_the_head_too(model):
    config = tf.Qwen3Config(**bench.SHAPES["tiny"], tie_word_embeddings=False)
    untied = tf.AutoModelForCausalLM.from_config(config)
    assert weight_bytes(untied) == weight_bytes(model) == sum(weight.nbytes for weight in model.parameters())


def test_a_step_is_held_against_its_bytes(model, monkeypatch):
    monkeypatch.setattr(bench, "step_bound", lambda *_: StepBound(0.2, 0.05, 0.15))
    monkeypatch.setattr(bench, "make_engine", lambda model, *_: bench_engine())
    for seconds, num_seqs, verdict in ((0.32, 64, False), (0.3, 64, True), (0.32, 2, None)):
        monkeypatch.setattr(bench, "decode_seconds", lambda *_, seconds=seconds: [seconds])
        row = bench.decode_row(model, num_seqs, 8, 1.0, "kvpage")
        assert row["bytes ms"] == 200 and row["over bytes"].median == pytest.approx(seconds / 0.2)
        assert row["is_met"] is verdict


def bench_engine():
    return types.SimpleNamespace(stats=lambda: types.SimpleNamespace(graphs=None), attention_backend="kvpage")


def test_the_bound_of_served_tokens_is_a_step_for_each_of_an_answer(model, monkeypatch):
    asked = []
    monkeypatch.setattr(bench, "step_bound", lambda model, *sizes: asked.append(sizes) or StepBound(0.2, 0.05, 0.1))
    options = types.SimpleNamespace(requests=10, prompt_tokens=400, tokens=100)
    assert bench.served_bound(model, options, 7.0) == 10 / 0.25
    assert asked == [(10, 350, 7.0)], "300 tokens of a prompt, and half an answer"


def test_the_bound_leaves_the_model_as_it_was(model):
    tokens = torch.tensor([[1, 2, 3]])
    with torch.no_grad():
        want = model(tokens).logits
        step_bound(model, 1, 3, bandwidth=1e9)
        assert model.config._attn_implementation == "sdpa" and torch.equal(model(tokens).logits, want)


def test_served_tokens_are_those_of_the_engine(model):
    prompts = bench.make_prompts(3, 9, 20, 256)
    assert all(9 <= len(prompt) <= 20 for prompt in prompts)
    engine = bench.make_engine(model, 3, 24, "auto")
    want = [output.token_ids for output in engine.generate(prompts, SamplingParams(max_tokens=4, ignore_eos=True))]
    moments = serve_kvpage(engine, prompts, 4)
    assert moments.tokens == want and [len(times) for times in moments.times] == [4, 4, 4]
    assert all(moments.begin <= times[0] <= times[-1] for times in moments.times)


def test_only_steps_in_which_all_decode_are_timed(model):
    engine = bench.make_engine(model, 2, 40, "kvpage")
    assert len(bench.decode_seconds(engine, bench.make_prompts(2, 9, 9, 256), 8)) == 6
    assert not engine.has_unfinished
