"""Output of `kvpage replay`: sizes from memory and a model, a table, a sweep over sizes, curves."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from kvpage.layout.config import CacheConfig, ModelConfig, ParallelConfig, cache_block_bytes
from kvpage.tools.replay import ReplayConfig, ReplayReport, TraceRequest
from kvpage.tools.replays.hybrid_replay import replay_of

GIB = 1 << 30
PICTURE = Path("kvpage-replay.png")
"""Where a sweep is drawn, unless another file is named."""
NAME_WIDTH, COLUMN_WIDTH = 28, 16  # characters of a table's names, and of a column
SWEPT = {
    "device-gib": "device_blocks",
    "host-gib": "host_blocks",
    "device-blocks": "device_blocks",
    "host-blocks": "host_blocks",
    "state-slots": "state_slots",
    "host-state-slots": "host_state_slots",
}


@dataclass(frozen=True, slots=True)
class Sweep:
    """One size in steps of a factor of two, from `first` to `last`, both included."""

    name: str
    first: float
    last: float

    @classmethod
    def parse(cls, text: str) -> Sweep:
        """Return the sweep of a text such as "device-gib=10:640". Raise ValueError for any other text."""
        match = re.fullmatch(r"([a-z-]+)=([0-9.]+):([0-9.]+)", text)
        if not match or match[1] not in SWEPT:
            raise ValueError(f"sweep must be like device-gib=10:640, with one of {', '.join(SWEPT)}, got {text!r}")
        first, last = float(match[2]), float(match[3])
        if not 0 < first <= last:
            raise ValueError(f"sweep must go from a positive size up, got {text!r}")
        return cls(match[1], first, last)

    def sizes(self) -> list[float]:
        """Return the sizes."""
        sizes = [self.first]
        while sizes[-1] * 2 < self.last:
            sizes.append(sizes[-1] * 2)
        return sizes + [self.last] * (sizes[-1] < self.last)

    def configs(self, config: ReplayConfig) -> list[ReplayConfig]:
        """Return a configuration for each size."""
        counts = [blocks_of(self.name, size, config.block_bytes) for size in self.sizes()]
        sizes: list[dict[str, Any]] = [{SWEPT[self.name]: count} for count in counts]
        return [dataclasses.replace(config, **size) for size in sizes]


def with_policies(config: ReplayConfig, intervals: Sequence[int]) -> list[ReplayConfig]:
    """Return configurations with regular checkpoints: one without, and one for each distance of them in tokens."""
    return [config, *(dataclasses.replace(config, checkpoint_every=interval) for interval in intervals)]


def blocks_of(name: str, size: float, block_bytes: int) -> int:
    """Return the number of blocks in `size`, which is GiB if the name ends so.

    Raises:
        ValueError: The bytes of a block are not known.
    """
    if not name.endswith("-gib"):
        return int(size)
    if block_bytes == 0:
        raise ValueError(f"{name} needs a model config, which says how large a block is")
    return int(size * GIB) // block_bytes


def block_bytes_of(model_config: Path, block_size: int, cache_dtype: str, tensor_parallel_size: int) -> int:
    """Return the bytes of a block in all layers of one rank, from the config.json of a Hugging Face model."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(str(model_config), trust_remote_code=False)
    is_latent = getattr(config.get_text_config(decoder=True), "kv_lora_rank", None) is not None
    model = ModelConfig.from_hf(config, use_mla=is_latent)
    cache = CacheConfig(block_size=block_size, cache_dtype=cache_dtype, backend="mla" if is_latent else "flash")
    return cache_block_bytes(cache, model, ParallelConfig(tensor_parallel_size))


def replay_all(requests: list[TraceRequest], configs: list[ReplayConfig], console: Console) -> list[ReplayReport]:
    """Run one replay for each configuration, with a progress bar (on a terminal)."""
    columns = TextColumn("replaying"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("requests", total=len(requests) * len(configs))
        advance = _every(256, lambda count: progress.advance(task, count))
        return [replay_of(config).run(requests, advance) for config in configs]


def _every(count: int, call: Callable[[int], Any]) -> Callable[[], None]:
    """Return a function that calls only each `count`th time: a progress bar must not cost more than its work."""
    state = [0]

    def step() -> None:
        state[0] += 1
        if state[0] == count:
            state[0] = 0
            call(count)

    return step


def figures(config: ReplayConfig, report: ReplayReport) -> dict[str, Any]:
    """Return the numbers of one replay, ready for JSON."""
    share = 1 / report.prompt_tokens if report.prompt_tokens else 0.0
    columns = {
        "device_blocks": config.device_blocks,
        "host_blocks": config.host_blocks,
        "device_gib": config.device_blocks * config.block_bytes / GIB,
        "host_gib": config.host_blocks * config.block_bytes / GIB,
        "requests": report.requests,
        "skipped": report.skipped,
        "prompt_tokens": report.prompt_tokens,
        "hit_rate": report.hit_rate,
        "device_hit_rate": report.device_hit_tokens * share,
        "host_hit_rate": report.host_hit_tokens * share,
        "evicted_blocks": report.evicted_blocks,
        "demoted_blocks": report.demoted_blocks,
        "lost_host_blocks": report.lost_host_blocks,
        "loaded_gib": report.loaded_bytes / GIB,
        "stored_gib": report.stored_bytes / GIB,
        "mean_gb_per_second": report.bytes_per_second / 1e9,
        "peak_gb_per_second": report.peak_bytes_per_second / 1e9,
        "computed_tokens_per_second": report.computed_tokens_per_second,
    }
    if config.state_slots:
        columns |= {
            "state_slots": config.state_slots,
            "host_state_slots": config.host_state_slots,
            "checkpoint_every": config.checkpoint_every or 0,
            "state_gib": config.state_slots * config.state_bytes / GIB,
            "kv_rate": report.kv_tokens * share,
            "kept_states": report.kept_states,
            "restored_states": report.restored_states,
            "evicted_states": report.evicted_states,
            "lost_states": report.lost_states,
        }
    if config.prefill_tokens_per_second is not None:
        columns["busy_share"] = report.busy_share
        for name in ("first_token_seconds", "queued_seconds"):
            columns |= {f"{name}_p{percent}": report.percentile(name, percent) for percent in (50, 99)}
    return columns


def show(configs: list[ReplayConfig], reports: list[ReplayReport], console: Console) -> None:
    """Print tables with a column for each replay, as many in one as fit: none is cut."""
    columns = [figures(config, report) for config, report in zip(configs, reports, strict=True)]
    num_columns = max(1, (console.width - NAME_WIDTH) // COLUMN_WIDTH)
    for first in range(0, len(columns), num_columns):
        console.print(_table(columns[first : first + num_columns], first + 1))
    if any(report.busy_share > 1 for report in reports):
        console.print("busy share above 1: one machine is too slow for this trace, and its queue grows to the end")


def _table(columns: list[dict[str, Any]], first: int) -> Table:
    """Return the table of some replays. first: the number of the first one."""
    table = Table("", *(str(first + i) for i in range(len(columns))), title="kvpage replay")
    for name in columns[0] if columns else ():
        values = [column[name] for column in columns]
        if name.endswith("gib") and not any(values):
            continue  # the size of a block is not known
        table.add_row(
            name.replace("_", " "), *(f"{value:,.3f}" if isinstance(value, float) else f"{value:,}" for value in values)
        )
    return table


def as_json(configs: list[ReplayConfig], reports: list[ReplayReport]) -> str:
    """Return the numbers of all replays as JSON."""
    return json.dumps([figures(config, report) for config, report in zip(configs, reports, strict=True)])


def give(
    sweep: Sweep | None, configs: list[ReplayConfig], reports: list[ReplayReport], path: Path | None, is_json: bool
) -> None:
    """Print the table or JSON, and draw into `path`; a sweep is drawn without one, too."""
    if is_json:
        print(as_json(configs, reports))
    else:
        show(configs, reports, Console())
    if path is None and sweep:
        path = PICTURE
    if path:
        plot(sweep, configs, reports, path)
        Console(stderr=True).print(f"drawn: {path}")


def plot(sweep: Sweep | None, configs: list[ReplayConfig], reports: list[ReplayReport], path: Path) -> None:
    """Draw the hit rate over the swept size, for each policy. Without a sweep, draw the blocks in use over time."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    if sweep:
        _draw_sweep(axes, sweep, [figures(c, r) for c, r in zip(configs, reports, strict=True)])
    else:
        _draw_use(axes, reports[0])
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=150)


def _draw_sweep(axes: Any, sweep: Sweep, columns: Iterable[dict[str, Any]]) -> None:
    rows = list(columns)
    if rows[-1].get("state_slots"):
        _draw_policies(axes, sweep, rows)
    else:
        _draw_tiers(axes, sweep, rows)
    axes.set_xscale("log", base=2)
    axes.set(xlabel=sweep.name, ylabel="prompt tokens found (%)", title="Hit rate by memory")


def _draw_tiers(axes: Any, sweep: Sweep, rows: list[dict[str, Any]]) -> None:
    curves = {"device_hit_rate": "device"}
    if any(row["host_blocks"] for row in rows):  # else the device's curve would hide the sum of both
        curves = {"hit_rate": "both tiers", **curves, "host_hit_rate": "host"}
    for name, label in curves.items():
        axes.plot(sweep.sizes(), [100 * row[name] for row in rows], marker="o", label=label)


def _draw_policies(axes: Any, sweep: Sweep, rows: list[dict[str, Any]]) -> None:
    """Draw a curve for each policy of checkpoints, and the hits that K and V alone would allow."""
    sizes = sweep.sizes()
    axes.plot(sizes, [100 * row["kv_rate"] for row in rows[: len(sizes)]], "k--", label="K and V are cached")
    for begin in range(0, len(rows), len(sizes)):
        of_one = rows[begin : begin + len(sizes)]
        interval = of_one[0]["checkpoint_every"]
        label = f"and one every {interval:,} tokens" if interval else "checkpoints at ends and splits"
        axes.plot(sizes, [100 * row["hit_rate"] for row in of_one], marker="o", label=label)


def _draw_use(axes: Any, report: ReplayReport) -> None:
    minutes = [timestamp / 60_000 for timestamp, _, _ in report.used_blocks]
    axes.plot(minutes, [device for _, device, _ in report.used_blocks], label="device")
    if any(host for _, _, host in report.used_blocks):
        axes.plot(minutes, [host for _, _, host in report.used_blocks], label="host")
    axes.set(xlabel="minutes of the trace", ylabel="blocks in use", title="Blocks in use")
