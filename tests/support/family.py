"""One type of decoder: a tiny model of it, tried with Engine and KVPageCachePool."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import torch
import transformers as tf
from support.family_configs import MAX_PARAMETERS, NOT_FROM_AUTO, decoder_types, make_config, num_released
from support.models import VOCAB, generate_each, spread_sinks

from kvpage import CacheConfig
from kvpage.serving import Engine, EngineConfig, KVPageCache, KVPageCachePool, SamplingParams

BLOCK_SIZE = 4
CHUNK = 7
NUM_TOKENS = 8
EQUAL, LOADS, WRONG = "equal", "loads", "WRONG"
WEIGHT_STDS = 0.3, 0.1, 0.05  # one after the other, until tokens vary: norms after each layer need small ones
MIN_DISTINCT = 7
CACHE = CacheConfig(block_size=BLOCK_SIZE, num_gpu_blocks=64)


@dataclass(frozen=True, slots=True)
class Family:
    """kind: model_type of the config. engine, cache: "equal", or why it is refused. num_distinct: different tokens
    among those compared, 0 where nothing was. trouble: why no model was made, or what went wrong; empty if nothing.
    """

    kind: str
    name: str = ""
    engine: str = ""
    cache: str = ""
    num_distinct: int = 0
    trouble: str = ""

    @property
    def is_wrong(self) -> bool:
        return self.engine.startswith(WRONG) or self.cache.startswith(WRONG)

    @property
    def num_served(self) -> int:
        """In how many of the two classes tokens are equal."""
        return (self.engine, self.cache).count(EQUAL)


def make_family_model(kind: str, weight_std: float = WEIGHT_STDS[0], released: int = 0) -> tf.PreTrainedModel:
    """A tiny random model in fp32 and eval mode. ValueError if it would be large. released: see make_config."""
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in _from_config(kind, released).parameters())
    if size > MAX_PARAMETERS:
        raise ValueError(f"a tiny model must have at most {MAX_PARAMETERS:,} parameters, {kind} has {size:,}")
    torch.manual_seed(0)
    model = _from_config(kind, released).float().eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=weight_std)
    spread_sinks(model)
    return model


def _from_config(kind: str, released: int) -> tf.PreTrainedModel:
    config = make_config(kind, released)
    if kind in NOT_FROM_AUTO:
        return getattr(tf, decoder_types()[kind])._from_config(config, attn_implementation="eager")
    return tf.AutoModelForCausalLM.from_config(config, attn_implementation="eager")


def judge(kind: str) -> Family:
    """Computes with tiny models of the type: with `generate`, Engine and KVPageCache. Of several released models the
    one that is served worst decides.
    """
    families = [judge_released(kind, released) for released in range(num_released(kind))]
    return min(families, key=lambda family: (not family.is_wrong, family.num_served, family.num_distinct))


def judge_released(kind: str, released: int) -> Family:
    """The first weights whose tokens vary decide, or else those whose tokens vary most; a wrong token always does."""
    families = []
    for weight_std in WEIGHT_STDS:
        family = judge_one(kind, weight_std, released)
        if family.num_distinct == 0 or family.num_distinct >= MIN_DISTINCT or family.is_wrong:
            return family
        families.append(family)
    return max(families, key=lambda family: family.num_distinct)


def judge_one(kind: str, weight_std: float, released: int = 0) -> Family:
    """Try the model with weights of this standard deviation."""
    try:
        model = make_family_model(kind, weight_std, released)
    except Exception as error:  # whatever a type that is new to us raises
        return Family(kind, decoder_types()[kind], trouble=f"not tried: {words_of(error)[:80]}")
    engine, cache = refusal(lambda: make_engine(model)), refusal(lambda: make_pool(model))
    family = Family(kind, type(model).__name__, engine or LOADS, cache or LOADS)
    return family if engine and cache else compare(model, family)


def refusal(make: Callable[[], object]) -> str:
    """Why it is refused; empty if it is not."""
    try:
        make()
    except Exception as error:  # ValueError of ours, or an error of the model itself
        return words_of(error)
    return ""


def words_of(error: Exception) -> str:
    """One line, with the type of those that are not ours to raise."""
    text = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
    return " ".join(text.split())[:400]


def make_engine(model: tf.PreTrainedModel) -> Engine:
    return Engine.from_model(model, EngineConfig(CACHE, max_num_batched_tokens=CHUNK))


def make_pool(model: tf.PreTrainedModel) -> KVPageCachePool:
    """Return a pool, of latents where the model gives latents to its cache."""
    try:
        return KVPageCachePool.from_model(model, CACHE)
    except ValueError as error:
        if "hands latents" not in str(error) and "backend must be 'mla'" not in str(error):
            raise
    return KVPageCachePool.from_model(model, dataclasses.replace(CACHE, backend="mla"))


def compare(model: tf.PreTrainedModel, family: Family) -> Family:
    """Compare tokens with those of `generate`, also from cached blocks."""
    expected = generate_each(model, prompts(), NUM_TOKENS)
    found = dict(engine=family.engine, cache=family.cache)
    if family.engine == LOADS:
        engine = make_engine(model)
        rounds = [engine.generate(prompts(), SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)) for _ in range(2)]
        found["engine"] = verdict([[output.token_ids for output in outputs] for outputs in rounds], expected)
    if family.cache == LOADS:
        pool = make_pool(model)
        found["cache"] = verdict([generate_cached(model, pool) for _ in range(2)], expected)
    return dataclasses.replace(family, **found, num_distinct=len({token for row in expected for token in row}))


def verdict(rounds: list[list[list[int]]], expected: list[list[int]]) -> str:
    return EQUAL if all(tokens == expected for tokens in rounds) else f"{WRONG}: {rounds} for {expected}"


def generate_cached(model: tf.PreTrainedModel, pool: KVPageCachePool) -> list[list[int]]:
    """The tokens of `generate` over the blocks of the pool."""
    outputs = []
    for prompt in prompts():
        row = torch.tensor([prompt])
        with KVPageCache(pool, row) as cache:
            tokens = model.generate(
                row, attention_mask=torch.ones_like(row), max_new_tokens=NUM_TOKENS, do_sample=False, pad_token_id=0,
                past_key_values=cache, prefill_chunk_size=CHUNK, use_cache=True,
            )  # fmt: skip
        outputs.append(tokens[0, len(prompt) :].tolist())
    return outputs


def prompts() -> list[list[int]]:
    """Two that share their beginning, in whole blocks and a part."""
    generator = torch.Generator().manual_seed(0)
    shared, *tails = [torch.randint(1, VOCAB, (length,), generator=generator).tolist() for length in (10, 5, 9)]
    return [shared + tail for tail in tails]
