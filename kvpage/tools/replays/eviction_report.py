"""Output of `kvpage replay --eviction`: a table, a picture and JSON of policies side by side."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from kvpage.tools.replay import ReplayConfig, TraceRequest
from kvpage.tools.replays.agent_trace import AgentTraceConfig, agent_trace
from kvpage.tools.replays.eviction_replay import NAMES, EvictionResult, figures, replay_eviction
from kvpage.tools.replays.replay_report import PICTURE

AGENTS = "agents"
"""Names a generated trace: agents, or agents:SEED."""
PREFILL = 10_000.0  # tokens a second, unless told
COLUMNS = "hit_rate", "misses_saved", "part_of_belady", "job_seconds", "job_speedup"


def generated(trace: str, hash_tokens: int) -> list[TraceRequest] | None:
    """Return the generated trace of that name; None for another name.

    Args:
        trace: "agents", or "agents:" and a seed.
        hash_tokens: Tokens of a hash id.

    Raises:
        ValueError: The seed is no number.
    """
    name, _, seed = trace.partition(":")
    if name != AGENTS:
        return None
    return agent_trace(AgentTraceConfig(hash_tokens=hash_tokens, seed=int(seed or 0)))


def parse_names(text: str) -> list[str]:
    """Return the policies of a text such as "lru,cost".

    Args:
        text: Names, separated by commas.

    Raises:
        ValueError: One is unknown.
    """
    names = text.split(",")
    for name in names:
        if name not in NAMES:
            raise ValueError(f"eviction must be one of {', '.join(NAMES)}, got {name!r}")
    return names


def compare(
    names: Sequence[str], requests: list[TraceRequest], configs: Sequence[ReplayConfig]
) -> list[dict[str, Any]]:
    """Replay a trace under each policy on each machine. Return the numbers.

    Args:
        names: The policies.
        requests: The trace.
        configs: The machines. Their device tiers count, in whole hash ids, and the speed of prefill.
    """
    results: list[EvictionResult] = []
    for config in configs:
        size = config.device_blocks * config.block_size // config.hash_tokens
        speed = config.prefill_tokens_per_second or PREFILL
        results += [replay_eviction(name, requests, size, config.hash_tokens, speed) for name in names]
    return figures(results)


def give(rows: Sequence[dict[str, Any]], path: Path | None, is_json: bool) -> None:
    """Print the table or JSON, and draw into `path`; several sizes are drawn without one, too.

    Args:
        rows: As `compare` returns them.
        path: Where to draw.
        is_json: Whether to print JSON.
    """
    if is_json:
        print(json.dumps(rows))
    else:
        Console().print(_table(rows))
    if path is None and len({row["device_blocks"] for row in rows}) > 1:
        path = PICTURE
    if path is not None:
        plot(rows, path)
        Console(stderr=True).print(f"drawn: {path}")


def plot(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw the hit rate over the size, a curve for each policy.

    Args:
        rows: As `compare` returns them.
        path: The picture's file.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    for name in dict.fromkeys(row["name"] for row in rows):
        points = [(row["device_blocks"], 100 * row["hit_rate"]) for row in rows if row["name"] == name]
        axes.plot(*zip(*points, strict=True), "k--" if name == "belady" else "-", marker="o", label=name)
    axes.set_xscale("log", base=2)
    axes.set(xlabel="blocks of hash ids", ylabel="prompt tokens found (%)", title="Hit rate by policy of eviction")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=150)


def _table(rows: Sequence[dict[str, Any]]) -> Table:
    columns = [name for name in COLUMNS if any(name in row for row in rows)]
    table = Table("eviction", "blocks", *(name.replace("_", " ") for name in columns), title="kvpage replay")
    for row in rows:
        table.add_row(row["name"], f"{row['device_blocks']:,}", *(f"{row.get(name, 0.0):,.3f}" for name in columns))
    return table
