"""What do checkpoints of states cost? The same requests through two engines, one of which keeps none.

    prefill    a prompt that nobody has sent before, up to its first token: with checkpoints its state is kept one token
               before its end, where a second call of each mixer begins
    decode     the steps after it, up to the last token
    restore    the copy that a prompt with a checkpoint begins with: one plan, one run of bytes

The bound is arithmetic: a checkpoint is a copy of the state, at the speed of torch's copy of as many bytes.

First the answers must be those of `model.generate`, also that of a prompt sent again, which must find all but its last
token. Then both engines take turns. Times are CPU times of the process. Added shares are taken turn by turn; medians
with their quartiles count.

Whole prefills differ by some percent from turn to turn on a shared machine, more than a checkpoint takes. So the parts
that it can add to are clocked, too, in both engines:

    step   ├─ engine ─┬─ model ─┬─ mixer ─┬─ [ all tokens but the last ] ─┬─ mixer ─┬─ [ last ] ─┬─ mixer ─┬─ ...
             counts                counts                                   counts      counts     counts

The difference of their times is the share that counts. Without a checkpoint one call takes all tokens. In decodes the
engine and the mixers count, without their calls.
"""

import argparse
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import numpy as np
import torch
import transformers as tf

from kvpage.benchmarks.cells import Row, shown
from kvpage.benchmarks.figure import Figure, in_turns, seconds
from kvpage.benchmarks.part_clock import PartClock
from kvpage.benchmarks.pictures import grouped
from kvpage.benchmarks.script import finish, option, parse
from kvpage.benchmarks.serving_workloads import engine_for
from kvpage.benchmarks.state_families import FAMILIES, SHAPE, VOCAB, Shape, make_family
from kvpage.blocks.moves import BlockMove
from kvpage.cache.state_cache import StateCache
from kvpage.serving import Engine, SamplingParams, StateConfig
from kvpage.serving.model.runner import ModelRunner
from kvpage.serving.model.states.mixer_forward import MixerForward
from kvpage.serving.model.states.model_states import ModelStates
from kvpage.serving.model.states.state_pass import StatePass

NUM_KEPT = 8  # checkpoints
GATE_TOKENS = 8
COPIES = 20
"""Of a state, in one measurement."""
COLUMNS = (
    "{family:<14}{prefill ms:>11.0f}{prefill_added:>24.2%}{whole_prefill_added:>22.1%}{bound_added.median:>13.2%}"
    "{decode_added:>23.2%}{whole_decode_added:>20.1%}{restore_us:>18.0f}{bound_us.median:>10.0f}{MiB:>7.2f}"
)


def prompts(num_tokens: int) -> Iterator[list[int]]:
    """Yield prompts without a common beginning, without an end."""
    rng = np.random.default_rng(0)
    while True:
        yield rng.integers(1, VOCAB, num_tokens).tolist()


class Pieces:
    """The call of a mixer for some tokens, by their number: under two names, which a clock tells apart."""

    own = staticmethod(MixerForward.compute)

    @staticmethod
    def many(*call: Any) -> Any:
        return Pieces.own(*call)

    @staticmethod
    def one(*call: Any) -> Any:
        return Pieces.own(*call)

    @staticmethod
    def any(forward: MixerForward, cache: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *how: Any) -> Any:
        rows = next(one for one in (*args, *kwargs.values()) if isinstance(one, torch.Tensor))
        return (Pieces.one if rows.shape[1] == 1 else Pieces.many)(forward, cache, args, kwargs, *how)


PARTS: dict[str, list[tuple[Any, str]]] = {
    "engine": [(Engine, "add_request"), (Engine, "step")],
    "model": [(ModelRunner, "forward")],
    "mixers": [(StatePass, "compute")],
    "many": [(Pieces, "many")],
    "one": [(Pieces, "one")],
}


class Clocked:
    """An engine that answers one prompt after the other. It notes the seconds of each prefill, and of the decodes.

    asides: of the parts of a prefill that a checkpoint can add to. decode_asides: of those of the decodes.
    """

    def __init__(self, engine: Engine, prompts: Iterator[list[int]], max_tokens: int) -> None:
        self._engine, self._prompts = engine, prompts
        self._params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
        self.prefills: list[float] = []
        self.decodes: list[float] = []
        self.asides: list[float] = []
        self.decode_asides: list[float] = []

    def answer(self) -> None:
        with PartClock(PARTS, time.process_time) as clock:
            self.prefills.append(seconds(self._prefill, clock=time.process_time))
        self.asides.append(clock.seconds["engine"] + clock.seconds["mixers"] + clock.seconds["one"])
        with PartClock(PARTS, time.process_time) as clock:
            self.decodes.append(seconds(self._decode, clock=time.process_time))
        self.decode_asides.append(clock.seconds["engine"] + clock.seconds["mixers"])

    def _prefill(self) -> None:
        self._engine.add_request(next(self._prompts), self._params)
        while not self._engine.step():
            pass

    def _decode(self) -> None:
        while self._engine.has_unfinished:
            self._engine.step()


def check_answers(model: Any, engine: Engine, prompt: list[int]) -> None:
    """Raise AssertionError unless the answers are those of `model.generate`, the second one from a checkpoint."""
    params = SamplingParams(max_tokens=GATE_TOKENS, temperature=0.0)
    config = tf.GenerationConfig(max_new_tokens=GATE_TOKENS, do_sample=False, pad_token_id=0)
    expected = model.generate(torch.tensor([prompt]), generation_config=config)[0, len(prompt) :].tolist()
    for num_cached in (0, len(prompt) - 1):
        (output,) = engine.generate([prompt], params)
        assert output.num_cached_tokens == num_cached, (output.num_cached_tokens, num_cached)
        assert output.samples[0].token_ids == expected, (output.samples[0].token_ids, expected)


def restores(states: ModelStates) -> dict[str, Callable[[], object]]:
    """Return the copy of a state as an engine makes it, and torch's copy of as many bytes."""
    cache = StateCache(states.layout, 4)
    move = BlockMove("copy", np.array([[0, 2]]))
    source, target = cache.slots[1], cache.slots[3]
    return {"restore": lambda: cache.do_move(move), "bound": lambda: target.copy_(source)}


def measure(kind: str, options: argparse.Namespace) -> Row:
    model = make_family(kind, Shape(options.hidden, options.layers))
    states, given = ModelStates.of_model(model), prompts(options.prompt_tokens)
    num_tokens, slot_bytes = options.prompt_tokens + options.tokens, states.layout.slot_bytes
    without, kept = (
        engine_for(model, [num_tokens] * 2, max_num_seqs=1, states=StateConfig(checkpoint_bytes=num_bytes))
        for num_bytes in (0, 2 * NUM_KEPT * slot_bytes)
    )
    check_answers(model, kept, next(given))
    engines = {name: Clocked(one, given, options.tokens) for name, one in (("without", without), ("with", kept))}
    in_turns({name: one.answer for name, one in engines.items()}, options.rounds, rotates=True)
    copies = in_turns(restores(states), 3 * options.rounds, COPIES, functools.partial(seconds, clock=time.process_time))
    with_, plain = engines["with"], engines["without"]
    prefills = {name: Figure.of(engine.prefills[1:]) for name, engine in engines.items()}
    return {
        "family": kind,
        "states": FAMILIES[kind][0],
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "slot_bytes": slot_bytes,
        "prefill": prefills,
        "prefill_added": share(with_.asides, plain.asides, plain.prefills),
        "decode_added": share(with_.decode_asides, plain.decode_asides, plain.decodes),
        "whole_prefill_added": share(with_.prefills, plain.prefills, plain.prefills),
        "whole_decode_added": share(with_.decodes, plain.decodes, plain.decodes),
        "bound_added": Figure.of(copies["bound"], 1 / prefills["without"].median),
        "restore_us": Figure.of(copies["restore"], 1e6),
        "bound_us": Figure.of(copies["bound"], 1e6),
        "prefill ms": 1e3 * prefills["without"].median,
        "MiB": slot_bytes / 2**20,
    }


def share(first: list[float], second: list[float], whole: list[float]) -> Figure:
    """Return the difference as a share of the whole, turn by turn, without the first turn."""
    turns = zip(first[1:], second[1:], whole[1:], strict=True)
    return Figure.of((more - less) / total for more, less, total in turns)


def draw(rows: Sequence[Row], path: str) -> None:
    labels = {"prefill": "prefill_added", "decodes": "decode_added", "a copy alone": "bound_added"}
    series = {words: [row[name] * 100 for row in rows] for words, name in labels.items()}
    grouped(path, [row["family"] for row in rows], series, "% added by a checkpoint", [2])


def main() -> None:
    options = parse(
        "state_checkpoints",
        __doc__,
        rounds=15,
        threads=1,
        families=option(list(FAMILIES)[:3], choices=FAMILIES),
        hidden=SHAPE.hidden,
        layers=SHAPE.layers,
        prompt_tokens=2048,
        tokens=option(33, "of each answer; the first one ends the prefill"),
    )
    tf.logging.set_verbosity_error()
    with mock.patch.object(MixerForward, "compute", Pieces.any):
        rows = shown(COLUMNS, (measure(kind, options) for kind in options.families))
    finish(options, functools.partial(draw, rows), families=rows)


if __name__ == "__main__":
    main()
