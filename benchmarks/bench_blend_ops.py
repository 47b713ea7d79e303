"""How near does blending K and V come to copying them?

Blending a prompt's layer reads the K and V that were retrieved, turns K from the positions where it was computed to
those where it is used, puts the rows that were computed afresh in place of theirs, and writes both: the bound is a copy
of as many bytes, torch's copy_ into memory that is there, measured in the same run, alternating with the operations.
The result is checked before anything is timed, in fp64 by each pair's angle.

    turn        K turned                         turn+copy   K turned, V copied: what loads a segment into blocks
    blend       both, with fresh rows scattered, through CacheBlendImpl (new tensors, as it hands out)
    in place    the same through CacheBlendImpl(in_place=True), which writes turned K and fresh rows alone
    unturned    in place, of segments that are used where they were computed: nothing but fresh rows is written
    deviation   two tensors compared, against the copy's reading half
    eager       K un-turned and turned again by torch operations, V cloned, fresh rows put in by indices

Layers follow each other as in a model, so that nothing but what one layer holds can stay in a cache. On a CPU the
operations write past the cache, which copy_ of as little does not: turning and copying together may take less.
Targets: on a CPU at most 2 copies for the whole blend, 0.6 of one unturned; on a GPU at least 0.85 of the copy's speed.
There it is the device's time, behind a delay until all is launched (benchmarks/device_clock.py); `hidden` says where
that failed.
"""

import functools
import math
import operator
import time
from collections.abc import Callable, Sequence

import torch

from kvpage import ops
from kvpage.benchmarks.cells import Row, shown
from kvpage.benchmarks.device_clock import DeviceClock, Timing
from kvpage.benchmarks.figure import Figure, seconds
from kvpage.benchmarks.pictures import bars
from kvpage.benchmarks.script import DEVICE, finish, option, parse
from kvpage.blend import RotaryTables
from kvpage.integrations.lmcache import CacheBlendImpl

HEADS, SIZE = 8, 128  # Llama 3 8B
SEGMENT = 512  # tokens that were computed together
RATIO = 0.15
MOST_EAGER = 4  # rounds of the slowest
COLUMNS = "{operation:<12} {ms:>24.2f} {GB/s:>18.1f} {copies:>18.2f} {hidden:>7}"
Calls = dict[str, Callable[[range], object]]
Layers = list[tuple[torch.Tensor, torch.Tensor]]


class Prompt:
    """Retrieved and fresh K and V of all layers: [tokens, HEADS * SIZE] bf16 each."""

    def __init__(self, num_layers: int, num_tokens: int, device: str) -> None:
        def rows(count: int) -> torch.Tensor:
            return torch.randn(count, HEADS * SIZE, device=device).to(torch.bfloat16)

        frequencies = 500000.0 ** -(torch.arange(0, SIZE, 2, device=device) / SIZE)
        self.tables = RotaryTables.of_frequencies(frequencies, SIZE)
        self.positions = torch.arange(num_tokens, device=device)
        self.original = self.positions % SEGMENT
        self.valid = torch.ones(num_tokens, dtype=torch.bool, device=device)
        self.bounds = torch.tensor([0, num_tokens])
        self.retrieved = [(rows(num_tokens), rows(num_tokens)) for _ in range(num_layers)]
        self.fresh = rows(num_tokens)
        self.room = [(torch.empty_like(k), torch.empty_like(v)) for k, v in self.retrieved]

        self.mixed = Blending(self, self.retrieved, self.original)
        # These mix what the copies have left in `room`; the last as if it had been computed at its positions.
        self.mixed_in_place = Blending(self, self.room, self.original, in_place=True)
        self.unturned = Blending(self, self.room, self.positions, in_place=True)

    def calls(self) -> Calls:
        """Return what takes turns. Each does some layers, in order; what all layers share is made at layer 0."""
        return {
            "copy": self.copy,
            "turn": self.turn,
            "turn+copy": self.turn_and_copy,
            "blend": self.mixed.run,
            "in place": self.mixed_in_place.run,
            "unturned": self.unturned.run,
            "deviation": self.deviation,
            "eager": self.eager,
        }

    def copy(self, layers: range) -> None:
        for layer in layers:
            for part, to in zip(self.retrieved[layer], self.room[layer], strict=True):
                to.copy_(part)

    def turn(self, layers: range) -> None:
        if 0 in layers:
            self.rotation = self.tables.rotation(self.original, self.positions, self.fresh.device)
        for layer in layers:
            ops.mix_rows(heads(self.retrieved[layer][0]), heads(self.room[layer][0]), self.rotation)

    def turn_and_copy(self, layers: range) -> None:
        self.turn(layers)
        for layer in layers:
            ops.mix_rows(self.retrieved[layer][1][:, None], self.room[layer][1][:, None])

    def deviation(self, layers: range) -> None:
        for layer in layers:
            k, v = self.retrieved[layer]
            ops.row_deviation(k[:, None], v[:, None], self.valid)

    def eager(self, layers: range) -> None:
        if 0 in layers:
            self.new, self.old = (self.tables.cos_sin(at) for at in (self.positions, self.original))
        for layer in layers:
            k, v = self.retrieved[layer]
            plain = eager_turn(heads(k).float(), self.old[0][:, None], -self.old[1][:, None])
            mixed_k = eager_turn(plain, *(part[:, None] for part in self.new)).to(k.dtype).view_as(k)
            mixed_v = v.clone()
            chosen, fresh = self.mixed.chosen, self.mixed.chosen_fresh
            mixed_k[chosen], mixed_v[chosen] = fresh, fresh


class Blending:
    """The layers of a prompt through an executor.

    retrieved: K and V of each layer; `in_place` overwrites them.
    original: the positions where they were computed, [tokens].
    """

    def __init__(self, prompt: Prompt, retrieved: Layers, original: torch.Tensor, in_place: bool = False) -> None:
        self.prompt, self.retrieved, self.original = prompt, retrieved, original
        self.executor = CacheBlendImpl(RATIO, rotary=prompt.tables, in_place=in_place)
        self.chosen: torch.Tensor | None = None
        self.chosen_positions, self.chosen_fresh = prompt.positions, prompt.fresh

    def run(self, layers: range) -> tuple[torch.Tensor, torch.Tensor]:
        """Return K and V of the last of the layers. The check layer chooses rows."""
        prompt, check_layer = self.prompt, self.executor.check_layer
        for layer in layers:
            is_chosen = layer > check_layer
            positions = self.chosen_positions if is_chosen else prompt.positions
            fresh = (self.chosen_fresh if is_chosen else prompt.fresh,) * 3
            output = self.executor.blend(
                layer, *self.retrieved[layer], prompt.valid, self.original, *fresh, positions, prompt.bounds
            )
            if layer == check_layer:
                self.chosen, self.chosen_positions = output.local_indices, output.positions
                self.chosen_fresh = prompt.fresh[self.chosen]
        return output.k, output.v


def heads(rows: torch.Tensor) -> torch.Tensor:
    return rows.view(len(rows), HEADS, SIZE)


def eager_turn(rows: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    x, y = rows.chunk(2, dim=-1)
    return torch.cat([x * cos - y * sin, y * cos + x * sin], dim=-1)


def check(prompt: Prompt) -> None:
    """The last layer's blends compared with fp64: K must be equal within the precision of bf16."""
    layers = range(len(prompt.retrieved))
    for mixed in (prompt.mixed, prompt.mixed_in_place, prompt.unturned):
        prompt.copy(layers)
        check_mixed(prompt, mixed, *mixed.run(layers))


def check_mixed(prompt: Prompt, mixed: Blending, k: torch.Tensor, v: torch.Tensor) -> None:
    last_k, last_v = prompt.retrieved[-1]
    pairs = torch.arange(0, SIZE, 2, dtype=torch.float64, device=k.device) / SIZE
    angles = (prompt.positions - mixed.original)[:, None].double() * 500000.0**-pairs
    want = eager_turn(heads(last_k).double(), angles.cos()[:, None], angles.sin()[:, None]).view_as(last_k)
    want_v = last_v.clone()
    want[mixed.chosen], want_v[mixed.chosen] = (prompt.fresh[mixed.chosen].to(to.dtype) for to in (want, want_v))
    torch.testing.assert_close(k.double(), want, rtol=2**-8, atol=2e-2)
    assert torch.equal(v, want_v), "V is not what was retrieved and computed"


def round_of(calls: Calls, parts: Sequence[range], clock: DeviceClock | None) -> dict[str, Timing]:
    """Time each call, part by part in turns: by the device's clock, or where there is none by the host's."""
    found = dict.fromkeys(calls, Timing(0.0, True))
    for part in parts:
        for name, call in calls.items():
            run = functools.partial(call, part)
            timing = clock.time(name, run, 1) if clock else Timing(seconds(run), True)
            before = found[name]
            found[name] = Timing(before.seconds + timing.seconds, before.is_hidden and timing.is_hidden)
    return found


def measure(prompt: Prompt, device: str, rounds: int, most_seconds: float = math.inf) -> list[Row]:
    """They take turns, on a CPU layer by layer, so that a noisy moment meets them all; the layers of a round add up."""
    num_layers = len(prompt.retrieved)
    step = 1 if device == "cpu" else num_layers
    parts = [range(first, first + step) for first in range(0, num_layers, step)]
    clock = None if device == "cpu" else DeviceClock()
    calls, turns, deadline = prompt.calls(), list[dict[str, Timing]](), time.monotonic() + most_seconds
    for number in range(rounds + 1):
        if number > 1 and time.monotonic() > deadline:
            break
        chosen = {name: call for name, call in calls.items() if name != "eager" or number < MOST_EAGER}
        turns.append(round_of(chosen, parts, clock))
    num_bytes = 2 * sum(k.nbytes + v.nbytes for k, v in prompt.retrieved)  # read and written
    copied = [turn["copy"].seconds for turn in turns[1:]]  # the first round warms up
    return [row(name, [turn[name] for turn in turns[1:] if name in turn], copied, num_bytes) for name in calls]


def row(name: str, timings: Sequence[Timing], copied: Sequence[float], num_bytes: int) -> Row:
    taken, share = [timing.seconds for timing in timings], 0.5 if name in ("turn", "deviation") else 1.0
    return {
        "operation": name,
        "ms": Figure.of(taken, 1e3),
        "GB/s": Figure.rate(num_bytes * share / 1e9, taken),
        "copies": Figure.of(map(operator.truediv, taken, copied), 1 / share),
        "hidden": all(timing.is_hidden for timing in timings),
    }


def main() -> None:
    words = "--layers must be at least 3: layer 1 chooses rows, those behind it blend, got {}"
    options = parse(
        "blend_ops",
        __doc__,
        check=lambda options: None if options.layers >= 3 else words.format(options.layers),
        rounds=10,
        threads=torch.get_num_threads(),
        device=DEVICE,
        layers=option(32, type=int),
        tokens=4096,
        seconds=option(math.inf, "after which no further round begins"),
    )
    torch.manual_seed(0)
    prompt = Prompt(options.layers, options.tokens, options.device)
    check(prompt)
    results = shown(COLUMNS, measure(prompt, options.device, options.rounds, options.seconds))
    copies, label = {row["operation"]: row["copies"] for row in results}, "time, in copies of as many bytes"
    draw = functools.partial(bars, values=copies, label=label, lines=[1.0, 2.0], xscale="log")
    finish(options, draw, heads=HEADS, **{"head size": SIZE}, results=results)


if __name__ == "__main__":
    main()
