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

    kvpage bench blend [--part all|quality|speed] [--full] [--seeds N ...] [--documents N] [--tokens N ...]
                       [--device cpu|cuda] [--threads N] [--plot PATH]
"""

import argparse
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from kvpage.benchmarks import blend_model, blend_quality, blend_speed
from kvpage.benchmarks.blend_quality import Answers, Method
from kvpage.benchmarks.figure import dumps

AGREEMENT = 0.98  # rows that differ by rounding alone may be chosen in another order
TARGET_RATIO, TARGET_LOSS, TARGET_SPEEDUP, TARGET_CEILING = 0.15, 0.02, 3.0, 0.8
SEGMENT_TOKENS = {"quality": 40, "speed": 512}


def quality(configs: Sequence[blend_model.TrainingConfig], num_documents: int, cache: Path) -> list[dict[str, Any]]:
    """Return a row for each method, over the documents of all models."""
    found: dict[Method, list[Answers]] = {}
    for config in configs:
        seed = config.seed
        model, attention = blend_model.load_or_train(config, cache)
        batches = blend_quality.batches(
            model, attention, num_documents, config.num_tokens, SEGMENT_TOKENS["quality"], seed
        )
        refers = torch.cat([batch.truth.refers for batch in batches]).float().mean().item()
        print(
            f"seed {seed}: {len(batches) * blend_quality.BATCH} documents, {refers:.1%} of their rows refer to others"
        )
        for name in list(blend_quality.ENGINES)[:2]:
            agreement = blend_quality.engine_agreement(batches[0], SEGMENT_TOKENS["quality"], 0.2, name)
            print(
                f"seed {seed}, {name}: of {batches[0].answers.numel()} blended answers the engine gives "
                f"{agreement.equal:.1%} as here, {agreement.right:.1%} right, {agreement.right_here:.1%} here",
                flush=True,
            )
            assert agreement.equal > AGREEMENT, "the engine must answer as the blending that is measured here"
        for method in dict.fromkeys(blend_quality.methods(config.num_layers)):
            found.setdefault(method, []).append(blend_quality.answers(batches, method))
    return [quality_row(method, each, found) for method, each in found.items()]


def quality_row(method: Method, each: Sequence[Answers], found: dict[Method, list[Answers]]) -> dict[str, Any]:
    """Accuracies are over questions about any fact ("all"), and about those that refer to another segment ("cross")."""
    exact = found[Method("v", ((1, 1.0),))]
    right, full, cross, drawn = (
        torch.cat(parts)
        for parts in (
            [one.right for one in each], [one.right for one in exact], [one.cross for one in each],
            [one.drawn for one in each],
        )
    )  # fmt: skip
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


def print_quality(rows: Sequence[dict[str, Any]]) -> None:
    print(f"\n{'method':22} {'check':>7} {'ratio':>15} {'all':>21} {'cross':>21} {'lost, all':>24}", end=" ")
    print(f"{'found':>6} {'work':>6}")
    for row in rows:
        check, ratio = ("+".join(f"{one:.3g}" for one in row[name]) for name in ("check", "ratios"))
        cells = ["{:.3f} ({:.3f} - {:.3f})".format(*row[name]) for name in ("all", "cross")]
        lost = "{:+.3f} ({:+.3f} - {:+.3f})".format(*row["lost"])
        print(f"{row['method']:22} {check:>7} {ratio:>15} {cells[0]:>21} {cells[1]:>21} {lost:>24}", end=" ")
        print(f"{row['refers found']:6.2f} {row['work']:6.3f}")


def shape_on(device: str) -> blend_speed.Shape:
    return blend_speed.LLAMA_3_8B if device == "cuda" else blend_speed.SMALL


def warming(rounds: int, device: str) -> blend_speed.Warming:
    num_tokens = SEGMENT_TOKENS["speed"]
    found = blend_speed.warming(shape_on(device), num_tokens, rounds, device)
    print(
        f"\nto keep a segment of {num_tokens} tokens: {found.alone:.3f} s by itself, "
        f"{found.measured:.3f} s with its sensitivity, {found.times_as_long:.2f} of it"
    )
    return found


def speed(
    tokens: Sequence[int], ratios: Sequence[float], check_layer: int | None, rounds: int, device: str
) -> list[dict[str, Any]]:
    shape = shape_on(device)
    chooses = "rows chosen before the first layer" if check_layer is None else f"check layer {check_layer}"
    print(f"\n{shape.name}, {chooses}")
    print(
        f"{'tokens':>7} {'method':>12} {'seconds':>22} {'times sooner':>22} {'cpu s':>22} {'times sooner':>22}", end=" "
    )
    print(f"{'ceiling':>8} {'of it':>6} {'again':>6}")
    rows = []
    for num_tokens in tokens:
        found = blend_speed.measure(shape, num_tokens, ratios, check_layer, rounds, device, SEGMENT_TOKENS["speed"])
        full = next(one for one in found if one.method == "full")
        for one in found:
            ceiling = full.flops / one.flops
            share = one.speedup.median / ceiling
            name = one.method if one.ratio is None else f"{one.method} {one.ratio:g}"
            cells = (f"{one.seconds:.3f}", f"{one.speedup:.2f}", f"{one.cpu:.3f}", f"{one.cpu_speedup:.2f}")
            print(f"{one.num_tokens:7} {name:>12}", *(f"{cell:>22}" for cell in cells), end=" ")
            print(f"{ceiling:7.2f}x {share:6.2f} {one.num_recomputed:6}", flush=True)
            rows.append({**one._asdict(), "ceiling": ceiling, "of ceiling": share})
    return rows


def verdicts(quality_rows: Sequence[dict[str, Any]], speed_rows: Sequence[dict[str, Any]]) -> dict[str, bool]:
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


def plot(quality_rows: Sequence[dict[str, Any]], speed_rows: Sequence[dict[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 4.5))
    single = [row for row in quality_rows if len(row["check"]) == 1]
    for name, check in dict.fromkeys((row["method"], row["check"][0]) for row in single):
        rows = [row for row in single if (row["method"], row["check"][0]) == (name, check)]
        if len(rows) > 3:
            rows.sort(key=lambda row: row["ratios"][0])
            low, high = ([abs(row["cross"][side] - row["cross"].mean) for row in rows] for side in (1, 2))
            style = "--" if name.startswith(("oracle", "random")) else "-"
            left.errorbar(
                [row["ratios"][0] for row in rows], [row["cross"].mean for row in rows], [low, high],
                linestyle=style, capsize=2, label=name if style == "--" else f"{name}, check layer {check}",
            )  # fmt: skip
    left.set(xlabel="share of rows computed again", ylabel="accuracy where the name is in another segment")
    for color, num_tokens in enumerate(dict.fromkeys(row["num_tokens"] for row in speed_rows)):
        rows = [row for row in speed_rows if row["num_tokens"] == num_tokens and row["ratio"] is not None]
        ratios = [row["ratio"] for row in rows]
        right.plot(
            ratios, [row["speedup"].median for row in rows], "o-", color=f"C{color}", label=f"{num_tokens} tokens"
        )
        right.plot(ratios, [row["ceiling"] for row in rows], ":", color=f"C{color}", label="its ceiling")
    right.axhline(1.0, color="gray", linewidth=0.8)
    right.set(
        xlabel="share of rows computed again", ylabel="full recompute's time to first token, over this", ylim=(0, None)
    )
    for axes in (left, right):
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize=7)
        else:
            axes.set_visible(False)
    figure.tight_layout()
    figure.savefig(path)


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="kvpage bench blend", description=__doc__.splitlines()[0])
    parser.add_argument("--part", default="all", choices=["all", "quality", "speed"])
    parser.add_argument("--full", action="store_true", help="three seeds, and longer prompts")
    parser.add_argument("--seeds", type=int, nargs="+", help="of the trainings")
    parser.add_argument("--layers", type=int, default=6, help="of the small Llama")
    parser.add_argument("--hidden", type=int, default=128, help="its hidden size")
    parser.add_argument("--documents", type=int, default=80, help="of each seed")
    parser.add_argument("--tokens", type=int, nargs="+", help="of the prompts that are timed")
    parser.add_argument("--ratios", type=float, nargs="+", default=[0.05, 0.15, 0.3, 0.5, 1.0])
    parser.add_argument("--check-layer", type=int, help="of the prompts that are timed; by default none")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"], help="of the prompts that are timed")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--cache", type=Path, default=blend_model.CACHE, help="where trained models are kept")
    parser.add_argument("--plot", type=Path)
    return parser.parse_args()


def main() -> None:
    chosen = options()
    if chosen.threads:
        torch.set_num_threads(chosen.threads)
    if chosen.device == "cuda" and not torch.cuda.is_available():
        print(dumps({"skipped": "Llama-3-8B's shape needs a CUDA device; --device cpu times a smaller one"}))
        return
    seeds = chosen.seeds or ([0, 1, 2] if chosen.full else [0])
    tokens = chosen.tokens or ([2048, 4096, 8192] if chosen.full else [2048, 4096])
    quality_rows, speed_rows, warm = [], [], None
    if chosen.part != "speed":
        configs = [blend_model.TrainingConfig(seed, chosen.layers, chosen.hidden) for seed in seeds]
        quality_rows = quality(configs, chosen.documents, chosen.cache)
        print_quality(quality_rows)
    if chosen.part != "quality":
        if chosen.device == "cpu":
            print("\nLlama-3-8B's shape: skipped, needs --device cuda")
        warm = warming(chosen.rounds, chosen.device)
        speed_rows = speed(tokens, chosen.ratios, chosen.check_layer, chosen.rounds, chosen.device)
    said = verdicts(quality_rows, speed_rows)
    for target, is_met in said.items():
        print(f"{'met   ' if is_met else 'missed'} {target}")
    if chosen.plot:
        plot(quality_rows, speed_rows, chosen.plot)
    machine = torch.cuda.get_device_name() if chosen.device == "cuda" else platform.processor() or platform.machine()
    print(
        dumps(
            {
                "benchmark": "blend", "machine": machine, "threads": torch.get_num_threads(),
                "torch": torch.__version__, "seeds": seeds, "quality": quality_rows, "speed": speed_rows,
                "warming": warm and warm._asdict(),
                "targets": said,
            }
        )
    )  # fmt: skip


if __name__ == "__main__":
    main()
