"""Does blending help: what do answers lose, how much sooner comes the first token, at which share of rows recomputed?

Quality: a small Llama is trained here (and kept under --cache) to say whose a fact is, in documents where that often
stands in another segment. Segments are computed by themselves, moved, and repaired by recomputing some of their rows,
chosen by several methods and at several layers; some by what a segment is behind a probe, computed once, when it is
kept. The bound is a full recompute, the other end plain reuse; between them
rows at random, and oracles that know what a full recompute gives. Gate: ratio 1 answers all as a full recompute does.
Intervals are of a bootstrap over documents (and seeds).

Speed: time to first token through kvpage.serving.Engine, of a Llama with random weights. The bound is the arithmetic
that the check layer and the chosen rows leave: full recompute, timed in the same run, times their share of its flops.
Gate: ratio 1 gives the token that a full recompute gives. What it costs before: to compute a segment twice, once more
behind itself, which tells the rows that change with what stands before them. Where others keep a machine's processors
busy, the processor time of one thread (--threads 1) tells more than the clock.
"""

import argparse
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from kvpage.benchmarks import blend_model, blend_quality, blend_speed
from kvpage.benchmarks.blend_quality import Answers, Method
from kvpage.benchmarks.cells import Row, fill, shown
from kvpage.benchmarks.pictures import curve, drawn, groups
from kvpage.benchmarks.script import DEVICE, finish, option, parse

AGREEMENT = 0.98  # rows that differ by rounding alone may be chosen in another order
TARGET_RATIO, TARGET_LOSS, TARGET_SPEEDUP, TARGET_CEILING = 0.15, 0.02, 3.0, 0.8
QUALITY_COLUMNS = (
    "{method:<22} {check:>7} {ratios:>15} {all:>21.3f} {cross:>21.3f} {lost:>24.3f} {refers found:>12.2f} {work:>6.3f}"
)
SPEED_COLUMNS = (
    "{num_tokens:>10} {method:>8} {ratio:>6} {seconds:>22.3f} {speedup:>22.2f} {cpu:>22.3f} {cpu_speedup:>22.2f} "
    "{ceiling:>8.2f} {of ceiling:>10.2f} {num_recomputed:>14}"
)
WARMING = (
    "\nto keep a segment of {num_tokens} tokens: {alone.median:.3f} s by itself, "
    "{measured.median:.3f} s with its sensitivity, {times_as_long.median:.2f} of it"
)
SEGMENT_TOKENS = {"quality": 40, "speed": 512}


def quality(configs: Sequence[blend_model.TrainingConfig], num_documents: int, cache: Path) -> list[Row]:
    """Return a row for each method, over the documents of all models."""
    answers: dict[Method, list[Answers]] = {}
    segment = SEGMENT_TOKENS["quality"]
    for config in configs:
        seed = config.seed
        model, attention = blend_model.load_or_train(config, cache)
        batches = blend_quality.batches(model, attention, num_documents, config.num_tokens, segment, seed)
        refers, num = torch.cat([batch.truth.refers for batch in batches]), len(batches) * blend_quality.BATCH
        print(f"seed {seed}: {num} documents, {refers.float().mean().item():.1%} of their rows refer to others")
        for name in list(blend_quality.ENGINES)[:2]:
            agreement = blend_quality.engine_agreement(batches[0], segment, 0.2, name)
            words = "of {} blended answers the engine gives {:.1%} as here, {:.1%} right, {:.1%} here"
            print(f"seed {seed}, {name}:", words.format(batches[0].answers.numel(), *agreement), flush=True)
            assert agreement.equal > AGREEMENT, "the engine must answer as the blending that is measured here"
        for method in dict.fromkeys(blend_quality.methods(config.num_layers)):
            answers.setdefault(method, []).append(blend_quality.answers(batches, method))
    full = torch.cat([of_seed.right for of_seed in answers[Method("v", ((1, 1.0),))]])
    return [quality_row(method, of_method, full) for method, of_method in answers.items()]


def quality_row(method: Method, each: Sequence[Answers], full: torch.Tensor) -> Row:
    """Accuracies are over questions about any fact ("all"), and about those that refer to another segment ("cross")."""
    right, cross, drawn = (torch.cat([getattr(one, name) for one in each]) for name in ("right", "cross", "drawn"))
    if method.stages[-1][1] == 1.0:
        assert all(bool(one.agrees.all()) for one in each), "ratio 1 must answer as a full recompute does"
    return {
        "method": method.name,
        "check": [layer for layer, _ in method.stages],
        "ratios": [ratio for _, ratio in method.stages],
        "all": blend_quality.estimate(right, drawn),
        "cross": blend_quality.estimate(right, cross),
        "lost": blend_quality.difference(full, right, drawn),
        "lost cross": blend_quality.difference(full, right, cross),
        "refers found": sum(one.share_found for one in each) / len(each),
        "work": sum(one.share_computed for one in each) / len(each),
        "by seed": [blend_quality.estimate(one.right, one.cross).mean for one in each],
    }


def speed(options: argparse.Namespace, tokens: Sequence[int]) -> tuple[Row, list[Row]]:
    """Return the figures of warming a segment, and a row for each prompt and method."""
    layer, device, segment = options.check_layer, options.device, SEGMENT_TOKENS["speed"]
    shape = blend_speed.LLAMA_3_8B if device == "cuda" else blend_speed.SMALL
    warm = blend_speed.warming(shape, segment, options.rounds, device)
    print(fill(WARMING, {"num_tokens": segment, **warm}))
    chooses = "rows chosen before the first layer" if layer is None else f"check layer {layer}"
    print(f"\nLlama of {shape.layers} layers of {shape.hidden}, {chooses}")
    how = options.ratios, layer, options.rounds, device, segment
    prompts = (blend_speed.measure(shape, num_tokens, *how) for num_tokens in tokens)
    return warm, shown(SPEED_COLUMNS, (row for rows in prompts for row in rows))


def verdicts(quality_rows: Sequence[Row], speed_rows: Sequence[Row]) -> dict[str, bool]:
    """Return whether each target is met: quality by every method that is no oracle, speed by the longest prompt."""
    said = {}
    for row in quality_rows:
        if row["ratios"][-1] == TARGET_RATIO and not row["method"].startswith("oracle"):
            check = "+".join(map(str, row["check"]))
            said[f"{row['method']} at {check}: lost at most {TARGET_LOSS}"] = row["lost"].mean <= TARGET_LOSS
    for row in speed_rows:
        if row["ratio"] == TARGET_RATIO:
            said[f"{row['num_tokens']} tokens: {TARGET_SPEEDUP:g}x sooner"] = row["speedup"].median >= TARGET_SPEEDUP
            said[f"{row['num_tokens']} tokens: {TARGET_CEILING} of the ceiling"] = row["of ceiling"] >= TARGET_CEILING
    return said


def plot(quality_rows: Sequence[Row], speed_rows: Sequence[Row], path: Path) -> None:
    with drawn(path, 1, 2, size=(12, 4.5)) as (left, right):
        draw_quality(left, [{**row, "layer": row["check"][0]} for row in quality_rows if len(row["check"]) == 1])
        for color, ((num_tokens,), rows) in enumerate(groups(speed_rows, "num_tokens").items()):
            chosen = [row for row in rows if row["ratio"] is not None]
            curve(right, chosen, "ratio", "speedup", color=f"C{color}", label=f"{num_tokens} tokens")
            curve(right, chosen, "ratio", "ceiling", ":", color=f"C{color}", label="its ceiling")
        right.axhline(1.0, color="gray", linewidth=0.8)
        right.set(ylabel="full recompute's time to first token, over this", ylim=(0, None))
        for axes, is_drawn in ((left, bool(quality_rows)), (right, bool(speed_rows))):
            axes.set(xlabel="share of rows computed again", visible=is_drawn)
            axes.legend(fontsize=7)


def draw_quality(axes: Any, rows: Sequence[Row]) -> None:
    for (name, layer), of_method in groups(rows, "method", "layer").items():
        if len(of_method) > 3:
            ordered = sorted(of_method, key=lambda row: row["ratios"][0])
            spread = [[abs(row["cross"][side] - row["cross"].mean) for row in ordered] for side in (1, 2)]
            is_bound = name.startswith(("oracle", "random"))
            axes.errorbar(
                [row["ratios"][0] for row in ordered], [row["cross"].mean for row in ordered], spread, capsize=2,
                linestyle="--" if is_bound else "-", label=name if is_bound else f"{name}, check layer {layer}",
            )  # fmt: skip
    axes.set(ylabel="accuracy where the name is in another segment")


def main() -> None:
    options = parse(
        "blend",
        __doc__,
        rounds=3,
        threads=torch.get_num_threads(),
        device=DEVICE,
        part=option("all", choices=["all", "quality", "speed"]),
        full=option(False, "three seeds, and longer prompts"),
        seeds=option(None, "of the trainings", type=int, nargs="+"),
        layers=option(6, "of the small Llama"),
        hidden=option(128, "its hidden size"),
        documents=option(80, "of each seed"),
        tokens=option(None, "of the prompts that are timed", type=int, nargs="+"),
        ratios=option([0.05, 0.15, 0.3, 0.5, 1.0]),
        check_layer=option(None, "of the prompts that are timed; by default none", type=int),
        cache=option(blend_model.CACHE, "where trained models are kept", type=Path),
    )
    options.seeds = options.seeds or ([0, 1, 2] if options.full else [0])
    tokens = options.tokens or ([2048, 4096, 8192] if options.full else [2048, 4096])
    quality_rows, speed_rows, warm = list[Row](), list[Row](), None
    if options.part != "speed":
        configs = [blend_model.TrainingConfig(seed, options.layers, options.hidden) for seed in options.seeds]
        quality_rows = quality(configs, options.documents, options.cache)
        print()
        keys = "check", "ratios"
        shown(
            QUALITY_COLUMNS,
            (row | {key: "+".join(f"{n:.3g}" for n in row[key]) for key in keys} for row in quality_rows),
        )
    if options.part != "quality":
        if options.device == "cpu":
            print("\nLlama-3-8B's shape: skipped, needs --device cuda")
        warm, speed_rows = speed(options, tokens)
    said = verdicts(quality_rows, speed_rows)
    shown("{met:<7} {target}", ({"met": is_met, "target": target} for target, is_met in said.items()))
    draw = functools.partial(plot, quality_rows, speed_rows)
    finish(options, draw, quality=quality_rows, speed=speed_rows, warming=warm, targets=said)


if __name__ == "__main__":
    main()
