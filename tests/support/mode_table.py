"""The table of docs/modes.md: every mode of an engine with every kind of model, each cell tried with a tiny model.

    python tests/support/mode_table.py --write docs/modes.md

A cell is "yes" if the mode works and gives the tokens of an engine without it. It is the reason, in the words of the
error, if it is refused.
"""

import argparse
import sys
import tempfile
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from support.cpu_graphs import as_on_a_device  # noqa: E402
from support.models import make_model, make_prompts  # noqa: E402
from support.state_models import make_state_model  # noqa: E402
from transformers import PreTrainedModel  # noqa: E402

from kvpage import CacheConfig, HostPolicy  # noqa: E402
from kvpage.blend.config import BlendConfig  # noqa: E402
from kvpage.observe.events.config import EventConfig  # noqa: E402
from kvpage.serving import BeamSearchParams, Branches, Engine, EngineConfig, PagedTokenTrie, SamplingParams  # noqa: E402
from kvpage.serving.assembly.state_parts import found_states  # noqa: E402
from kvpage.store import ArrivingStore, KVStore, KVStoreConfig, metadata_of  # noqa: E402

B = 4
PROMPT = make_prompts([5 * B + 3], seed=7)[0]
GREEDY = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
FREE = "tcp://127.0.0.1:*"
YES = "yes"
HEAD = """# Modes and kinds of models

Every mode of an engine with every kind of model: {yes} of {cells} cells work. Each was tried with a tiny model,
whose tokens are those of the same engine without the mode. The others are refused when the engine is made or asked,
with the reason.

- "all tokens": layers that attend to all tokens, such as Llama's.
- "latents": the same with `CacheConfig(backend="mla")`, such as DeepSeek's.
- "one table": layers with a window, whose blocks are those of all layers, such as Mistral's.
- "windows apart": layers with a window that have blocks of their own (`num_window_blocks`), such as Gemma 3's.
- "states": layers that keep a state, beside others that attend, such as Jamba's.
- "states, windows apart": both, such as RecurrentGemma's.

    python tests/support/mode_table.py --write docs/modes.md

"""


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of model. fields: of its EngineConfig. backend: of its cache."""

    make: Callable[[], PreTrainedModel]
    num_window_blocks: int | None = None
    backend: str = "flash"

    def config(self, num_cpu_blocks: int = 0, num_gpu_blocks: int = 96, **options: object) -> EngineConfig:
        cache = CacheConfig(B, num_gpu_blocks, num_cpu_blocks, backend=self.backend)
        windows = {"num_window_blocks": self.num_window_blocks} if self.num_window_blocks else {}
        return EngineConfig(cache, **{"max_num_seqs": 4, **windows, **options})

    def engine(self, **options: object) -> Engine:
        return Engine.from_model(self.make(), self.config(**options))

    def tokens(self) -> list[int]:
        return self.engine().generate([PROMPT], GREEDY)[0].token_ids


KINDS: dict[str, Kind] = {
    "all tokens": Kind(lambda: make_model("llama")),
    "latents": Kind(lambda: make_model("deepseek_v3"), backend="mla"),
    "one table": Kind(lambda: make_model("mistral")),
    "windows apart": Kind(lambda: make_model("gemma3"), 40),
    "states": Kind(lambda: make_state_model("jamba")),
    "states, windows apart": Kind(lambda: make_state_model("recurrent_gemma"), 40),
}


def answers(kind: Kind, engine: Engine, prompt: list[int] = PROMPT, **arguments: object) -> int:
    """Require the answer of an engine without the mode; return how much of the prompt was cached."""
    output = engine.generate([prompt], GREEDY, **arguments)[0]
    assert output.token_ids == kind.tokens()
    return output.num_cached_tokens


def prefixes(kind: Kind) -> None:
    engine = kind.engine(max_num_batched_tokens=7)
    answers(kind, engine)
    assert answers(kind, engine) >= 4 * B


def parts(kind: Kind) -> None:
    """A prompt that parts amid a block finds the tokens before that."""
    engine = kind.engine()
    for last in (5, 6):  # the second one notices where they part
        engine.generate([[*PROMPT[: 2 * B + 2], last, last]], GREEDY)
    found = engine.generate([[*PROMPT[: 2 * B + 2], 7, 7]], GREEDY)[0].num_cached_tokens
    if found <= 2 * B:
        raise ValueError("windows share whole blocks")


def host_tier(kind: Kind) -> None:
    engine = kind.engine(num_cpu_blocks=64, host_policy=HostPolicy(0))
    answers(kind, engine)
    assert answers(kind, engine) >= 4 * B


def preemption(kind: Kind) -> None:
    engine = kind.engine(num_gpu_blocks=14, num_cpu_blocks=64)
    outputs = engine.generate([PROMPT, [9, *PROMPT]], GREEDY)
    assert outputs[0].token_ids == kind.tokens() and engine.stats().num_preemptions


def pins(kind: Kind) -> None:
    engine = kind.engine(pin_quota=16)
    answers(kind, engine)
    engine.manager.space.unpin(engine.manager.space.pin(PROMPT))


def priorities(kind: Kind) -> None:
    engine = kind.engine(max_num_seqs=1)
    engine.add_request([9, *PROMPT], GREEDY, priority=5)
    answers(kind, engine)


def samples(kind: Kind) -> None:
    found = kind.engine().generate(
        [PROMPT], SamplingParams(n=3, temperature=1.0, seed=3, max_tokens=4, ignore_eos=True)
    )
    assert len(found[0].samples) == 3


def beams(kind: Kind) -> None:
    assert kind.engine().beam_search([PROMPT], BeamSearchParams(num_beams=2, max_tokens=4))[0].beams


def branches(kind: Kind) -> None:
    with Branches(kind.engine()) as trunks:
        trunk = trunks.start(PROMPT)
        trunks.compute([trunk])
        fork = trunks.fork(trunk)
        fork.append([5])
        trunks.compute([fork])


def tries(kind: Kind) -> None:
    with PagedTokenTrie(kind.engine()) as trie:
        trie.next_token_logprobs([PROMPT, [*PROMPT[:7], 5]])


def blending(kind: Kind) -> None:
    engine = kind.engine(blend=BlendConfig(ratio=1.0, separator=(PROMPT[2 * B - 1],)))
    engine.warm_segments([PROMPT[: 2 * B]])
    answers(kind, engine, blend=True)


def ranks(kind: Kind) -> None:
    """Two ranks are tried in tests/serving/loop/test_ranks.py; here, that nothing refuses them."""
    found_states(kind.make(), kind.config(tensor_parallel_size=2))


def graphs(kind: Kind) -> None:
    engine = as_on_a_device(kind.engine())
    answers(kind, engine)
    stats = engine.stats().graphs
    assert stats is not None and stats.num_replays > 0, stats


def compiling(kind: Kind) -> None:
    kind.config(compile_model=True)
    found_states(kind.make(), kind.config(compile_model=True))


def eight_bits(kind: Kind) -> None:
    cache = CacheConfig(B, 96, cache_dtype="fp8_e4m3", backend=kind.backend)
    config = EngineConfig(cache, max_num_seqs=4, num_window_blocks=kind.num_window_blocks, kv_scales="calibrate")
    assert Engine.from_model(kind.make(), config).generate([PROMPT], GREEDY)[0].token_ids


def events(kind: Kind) -> None:
    with closing(kind.engine(events=EventConfig(FREE, FREE))) as engine:
        answers(kind, engine)


def explaining(kind: Kind) -> None:
    engine = kind.engine()
    answers(kind, engine)
    assert engine.explain(PROMPT).num_cached_tokens >= 4 * B


def with_store(kind: Kind, wrap: Callable[[KVStore], object], **options: object) -> None:
    """A second engine begins where the first one has been."""
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(2):
            engine = kind.engine(load_or_compute=False, **options)
            store_config = KVStoreConfig(chunk_size=2 * B, tiers=(f"disk://{folder}?size=64MiB",))
            with KVStore(store_config, metadata_of(engine.cache, "tiny")) as store, closing(engine):
                engine.use_store(wrap(store))
                found = answers(kind, engine)
        assert found >= 2 * B


def stores(kind: Kind) -> None:
    with_store(kind, lambda store: store)


def roles(kind: Kind) -> None:
    """A prefill worker stores portions, which a decode worker waits for."""
    with_store(kind, lambda store: ArrivingStore(store, patience=1.0), save_portions=True)


def prompt_logprobs(kind: Kind) -> None:
    params = SamplingParams(max_tokens=3, temperature=0, ignore_eos=True, prompt_logprobs=1)
    assert len(kind.engine().generate([PROMPT], params)[0].prompt_logprobs) == len(PROMPT)


def rules(kind: Kind) -> None:
    kind.engine().generate([PROMPT], SamplingParams(max_tokens=3, temperature=0, logit_bias={5: 3.0}))


MODES: dict[str, Callable[[Kind], None]] = {
    "prompts in portions, shared prefixes": prefixes,
    "prefixes that end amid a block": parts,
    "host tier": host_tier,
    "preemption, to the host and back": preemption,
    "pins": pins,
    "priorities": priorities,
    "several samples of a prompt": samples,
    "beam search": beams,
    "`Branches`": branches,
    "`PagedTokenTrie`": tries,
    "blending": blending,
    "tensor-parallel ranks": ranks,
    "CUDA graphs (captured on a fake device)": graphs,
    "`compile_model`": compiling,
    "8-bit blocks": eight_bits,
    "events": events,
    "`explain`": explaining,
    "a store": stores,
    "roles over a store": roles,
    "`prompt_logprobs`": prompt_logprobs,
    "biases and rules of sampling": rules,
}


def cell(mode: str, kind: str) -> str:
    """Return "yes", or the reason of a refusal. An AssertionError is a wrong answer, and comes through."""
    try:
        MODES[mode](KINDS[kind])
    except ValueError as error:
        return str(error).partition("\n")[0]
    return YES


def page(cells: dict[tuple[str, str], str]) -> str:
    """Return the page. Reasons are notes below the table."""
    reasons = sorted({text for text in cells.values() if text != YES})
    lines = [f"| mode | {' | '.join(KINDS)} |", f"|---|{'---|' * len(KINDS)}"]
    for mode in MODES:
        texts = [cells[mode, kind] for kind in KINDS]
        marks = [YES if text == YES else f"no ({reasons.index(text) + 1})" for text in texts]
        lines.append(f"| {mode} | {' | '.join(marks)} |")
    notes = [f"{number}. {reason}" for number, reason in enumerate(reasons, 1)]
    num_yes = sum(text == YES for text in cells.values())
    head = HEAD.format(yes=num_yes, cells=len(cells))
    return head + "\n".join([*lines, "", "The reasons, in the words of the errors:", "", *notes]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--write", type=Path, required=True)
    path = parser.parse_args().write
    path.write_text(page({(mode, kind): cell(mode, kind) for mode in MODES for kind in KINDS}))


if __name__ == "__main__":
    main()
