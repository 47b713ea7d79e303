"""Adapters: each row's tokens are those of a model with the adapter's product added to its weights."""

import copy
from dataclasses import replace

import pytest
import torch
from support.lora_files import ALL, merged, targets, write_adapter
from support.models import generate_each, make_model, make_prompts
from support.weight_versions import WeightVersions

from kvpage import CacheConfig
from kvpage.blend import BlendConfig
from kvpage.serving import Engine, EngineConfig, SamplingParams
from kvpage.store import KVStore, KVStoreConfig, metadata_of

B, NUM_TOKENS = 4, 6
PARAMS = SamplingParams(max_tokens=NUM_TOKENS)
PROMPTS = make_prompts([5 * B, 5 * B + 1, 1], seed=4)


def make_engine(model: torch.nn.Module, **fields: object) -> Engine:
    return Engine.from_model(model, EngineConfig(CacheConfig(B, 128), **fields))


def run(engine: Engine, names: list[str | None]) -> tuple[list[list[int]], list[int]]:
    """Return the tokens of all prompts by each adapter, in one batch; and how many prompt tokens were found."""
    params = [replace(PARAMS, adapter=name) for name in names for _ in PROMPTS]
    outputs = engine.generate(PROMPTS * len(names), params)
    return [output.token_ids for output in outputs], [output.num_cached_tokens for output in outputs]


@pytest.mark.parametrize("fields", [{}, {"native_layers": False, "max_num_batched_tokens": 2 * B + 1}])
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_the_base_and_two_adapters_in_one_batch_cold_and_warm(tmp_path, kind, fields):
    model = make_model(kind)
    folders = {
        "a": write_adapter(tmp_path / "a", model, targets(model), seed=1),
        "b": write_adapter(tmp_path / "b", model, targets(model, ("v_proj", "down_proj")), 2, 2, use_rslora=True),
    }
    engine = make_engine(model, **fields)
    for name, folder in folders.items():
        engine.load_adapter(name, folder)
    names = [None, "a", "b"]
    models = [model, *(merged(model, folder) for folder in folders.values())]
    expected = [tokens for each in models for tokens in generate_each(each, PROMPTS, NUM_TOKENS)]
    assert len({tuple(tokens) for tokens in expected}) == len(expected)
    assert run(engine, names)[0] == expected
    tokens, found = run(engine, names)
    assert tokens == expected and found == [len(prompt) - 1 for prompt in PROMPTS] * 3
    assert run(engine, ["b", None, "a"])[0] == expected[6:] + expected[:6]


def test_what_an_adapter_computes_is_found_by_the_same_bytes_alone(tmp_path):
    model = make_model("llama")
    paths = targets(model)
    for name, seed in (("a", 1), ("same", 1), ("other", 2)):
        write_adapter(tmp_path / name, model, paths, seed)
    write_adapter(tmp_path / "alpha", model, paths, 1, lora_alpha=9)
    engine = make_engine(model)
    for name in ("a", "same", "other", "alpha"):
        engine.load_adapter(name, tmp_path / name)
    run(engine, ["a"])
    assert engine.explain(PROMPTS[0], adapter="same").num_cached_tokens == len(PROMPTS[0]) - 1
    for name in ("other", "alpha", None):
        assert engine.explain(PROMPTS[0], adapter=name).num_cached_tokens == 0
    assert run(engine, ["alpha"])[0] == generate_each(merged(model, tmp_path / "alpha"), PROMPTS, NUM_TOKENS)


@pytest.mark.parametrize(
    ("names", "layer", "keeps_kv"),
    [
        (("o_proj", "down_proj", "q_proj"), 2, True),
        (("o_proj",), 1, False),
        (("o_proj", "v_proj"), 2, False),
        (("k_proj",), 2, False),
    ],
)
def test_the_base_models_prefixes_are_shared_where_keys_and_values_stay(tmp_path, names, layer, keeps_kv):
    model = make_model("llama")
    folder = write_adapter(tmp_path / "a", model, targets(model, names, (layer,)))
    with torch.no_grad():  # what is claimed of K and V, seen in the model itself
        row = torch.tensor([PROMPTS[0]])
        caches = [each(row, use_cache=True).past_key_values for each in (model, merged(model, folder))]
        pairs = zip(*(cache.layers for cache in caches), strict=True)
        same = all(torch.equal(one.keys, two.keys) and torch.equal(one.values, two.values) for one, two in pairs)
    assert same == keeps_kv
    engine = make_engine(model)
    engine.load_adapter("a", folder)
    run(engine, [None])
    tokens, found = run(engine, ["a"])
    assert tokens == generate_each(merged(model, folder), PROMPTS, NUM_TOKENS)
    assert found == [len(prompt) - 1 if keeps_kv else 0 for prompt in PROMPTS]


def test_adapters_under_versions_and_in_a_store(tmp_path):
    versions = WeightVersions()
    folder = write_adapter(tmp_path / "a", versions.model, targets(versions.model))
    engine = make_engine(versions.model)
    engine.load_adapter("a", folder)
    with KVStore(KVStoreConfig(B, ("memory://?size=64MiB",)), metadata_of(engine.cache, "tiny")) as store:
        engine.use_store(store)
        for version in ("", "v1"):
            if version:
                engine.update_weights(version, lambda: versions.load("v1"))
            expected = generate_each(merged(versions.of(version), folder), PROMPTS, NUM_TOKENS)
            assert run(engine, ["a"])[0] == expected
        engine.close()
        other = make_engine(versions.model)
        other.use_store(store)
        other.load_adapter("again", folder)
        other.update_weights("v1")
        tokens, found = run(other, ["again"])
        assert tokens == expected and found[0] == 5 * B - B
        other.close()


def test_adapters_come_and_go_by_name(tmp_path):
    model = make_model("llama")
    folder = write_adapter(tmp_path / "a", model, targets(model))
    engine = make_engine(model)
    with pytest.raises(ValueError, match="adapter must be one that is loaded, got 'a'"):
        engine.add_request(PROMPTS[0], replace(PARAMS, adapter="a"))
    engine.load_adapter("a", folder)
    with pytest.raises(ValueError, match="name must not be that of a loaded adapter, 'a' is"):
        engine.load_adapter("a", folder)
    request_id = engine.add_request(PROMPTS[0], replace(PARAMS, adapter="a", n=2))
    engine.step()
    with pytest.raises(ValueError, match="must not be in use"):
        engine.unload_adapter("a")
    engine.abort(request_id)
    engine.unload_adapter("a")
    assert engine.stats().weights.adapters == ()
    assert run(engine, [None])[0] == generate_each(model, PROMPTS, NUM_TOKENS)
    with pytest.raises(ValueError, match="adapter must be one that is loaded"):
        engine.unload_adapter("a")


@pytest.mark.parametrize(
    "name",
    ["", "a/b", "/", "a\\b", "a\nb", "\x00", "a\x7f", "a\u200b", "\ud800", " a", "a ", ".", "..", "a" * 257],
)
def test_odd_names_are_refused_and_nothing_is_loaded(tmp_path, name):
    model = make_model("llama")
    folder, engine = write_adapter(tmp_path / "a", model, targets(model)), make_engine(model)
    with pytest.raises(ValueError, match="name must have"):
        engine.load_adapter(name, folder)
    assert engine.stats().weights.adapters == ()


def test_plain_names_are_taken(tmp_path):
    model = make_model("llama")
    folder, engine = write_adapter(tmp_path / "a", model, targets(model)), make_engine(model)
    names = ["sql", "a b", "v1.2-rc_3", "org:sql@2", "größe", "a" * 256]
    for name in names:
        engine.load_adapter(name, folder)
    assert engine.stats().weights.adapters == tuple(names)
    for wrong in (None, b"a", 3):
        with pytest.raises(TypeError, match="name must be a str"):
            engine.load_adapter(wrong, folder)


def test_what_is_not_served_is_refused_by_name(tmp_path):
    model = make_model("llama")
    engine, paths = make_engine(model), targets(model)
    for field, value in {
        "use_dora": True, "bias": "all", "modules_to_save": ["lm_head"], "peft_type": "IA3",
        "init_lora_weights": "pissa", "a_field_of_later": {"x": 1},
    }.items():  # fmt: skip
        folder = write_adapter(tmp_path / field, model, paths, **{field: value})
        with pytest.raises(ValueError, match=f"{field} of an adapter is not served"):
            engine.load_adapter("a", folder)
    for name, wrong_paths, message in (
        ("head", ["lm_head"], "lm_head"),
        ("embedding", ["model.layers.0.self_attn.q_proj", "lm_head"], "in none"),
    ):
        with pytest.raises(ValueError, match=message):
            engine.load_adapter("a", write_adapter(tmp_path / name, model, wrong_paths))
    wider = make_model("llama", intermediate_size=96)
    with pytest.raises(ValueError, match="lora_A and lora_B of .*must be"):
        engine.load_adapter("a", write_adapter(tmp_path / "wide", wider, targets(wider)))
    for number, (field, value, message) in enumerate((
        ("r", 0, "^r of an adapter must be a positive integer, got 0"),
        ("lora_alpha", "16", "^lora_alpha of an adapter must be a finite number, got '16'"),
        ("lora_alpha", float("nan"), "^lora_alpha of an adapter must be a finite number, got nan"),
        ("rank_pattern", ["x"], "^rank_pattern of an adapter must be an object, got .'x'."),
        ("rank_pattern", {"x": 1.5}, "^rank_pattern.'x'. of an adapter must be a positive integer, got 1.5"),
        ("alpha_pattern", {"(": 2}, "^alpha_pattern of an adapter must have regular expressions, got '.'"),
    )):  # fmt: skip
        folder = write_adapter(tmp_path / f"{number}", model, paths, **{field: value})
        with pytest.raises(ValueError, match=message):
            engine.load_adapter("a", folder)
    (folder / "adapter_config.json").write_text("[1]")
    with pytest.raises(ValueError, match="must be a JSON object, .* is of type list"):
        engine.load_adapter("a", folder)
    with pytest.raises(ValueError, match="adapter must be a folder with"):
        engine.load_adapter("a", tmp_path)
    (tmp_path / "head" / "adapter_config.json").write_text("{")
    with pytest.raises(ValueError, match="must be JSON"):
        engine.load_adapter("a", tmp_path / "head")
    with pytest.raises(ValueError, match="blend must be None for an engine with adapters"):
        make_engine(model, blend=BlendConfig()).load_adapter("a", write_adapter(tmp_path / "a", model, paths))
    assert engine.stats().weights.adapters == ()


def test_peft_computes_the_same_with_what_it_has_written(tmp_path):
    peft = pytest.importorskip("peft")
    model, engine = make_model("qwen3"), None
    patterns = {"rank_pattern": {"layers.0.self_attn.v_proj": 2}, "alpha_pattern": {"down_proj": 5}}
    for number, options in enumerate(
        ({"target_modules": list(ALL)}, {"target_modules": ["v_proj", "down_proj"], **patterns})
    ):
        torch.manual_seed(number)
        wrapped = peft.get_peft_model(copy.deepcopy(model), peft.LoraConfig(r=4, lora_alpha=16, **options)).eval()
        with torch.no_grad():
            for name, parameter in wrapped.named_parameters():
                if "lora_B" in name:
                    parameter.normal_(0, 0.3)
        wrapped.save_pretrained(tmp_path / f"{number}")
        engine = engine or make_engine(model)
        engine.load_adapter(f"{number}", tmp_path / f"{number}")
        assert run(engine, [f"{number}"])[0] == generate_each(wrapped.get_base_model(), PROMPTS, NUM_TOKENS)
