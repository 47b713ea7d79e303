"""The command line: `kvpage info`, `demo`, `serve`, `replay`, `store`, `explain`, `bench`. Extra: engine."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

try:
    import typer
    from rich.console import Console
    from rich.table import Table
except ModuleNotFoundError as error:
    extra = "serve" if sys.argv[1:2] == ["serve"] else "engine"
    raise SystemExit(f"the command line needs the extra '{extra}': pip install 'kvpage[{extra}]' ({error})") from error

from kvpage.tools.explain.cli import explain
from kvpage.tools.serve_cli import serve
from kvpage.tools.store_cli import store_app

if TYPE_CHECKING:
    from kvpage.tools.replay import TraceRequest

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
app.add_typer(store_app, name="store")
app.command()(serve)
app.command()(explain)


def _print_version(is_asked: bool) -> None:
    if is_asked:
        from kvpage.tools.build import build_info

        print(f"kvpage {build_info()['version']}")
        raise typer.Exit


@app.callback()
def kvpage(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="print the version and exit")
    ] = False,
) -> None:
    """The paged KV cache of a language-model server."""


@app.command()
def info(
    calibrate: Annotated[bool, typer.Option(help="also measure how swaps are best copied on the CUDA device")] = False,
) -> None:
    """Print versions and devices."""
    from kvpage.tools.build import build_info

    table = Table("part", "found", title="kvpage")
    for name, value in build_info().items():
        if isinstance(value, dict):
            for layout, chosen in value.items():
                table.add_row(f"{name}: {layout}", chosen)
        else:
            table.add_row(name, "none" if value is None else str(value))
    Console().print(table)
    if calibrate:
        _print_calibration(Console())


def _print_calibration(console: Console) -> None:
    from kvpage.cache.calibration import calibrate

    try:
        calibration = calibrate()
    except RuntimeError as error:
        console.print(f"no calibration: {error}")
        return
    groups = f"the kernel on {calibration.max_groups} thread groups"
    title = f"swaps on {calibration.device}, GB/s; {groups}; {calibration.seconds:.2f} s"
    table = Table("pieces of", "in: engine", "in: kernel", "out: engine", "out: kernel", title=title)
    for row_in, row_out in zip(calibration.swap_in, calibration.swap_out, strict=True):
        rates = (row_in.engine, row_in.kernel, row_out.engine, row_out.kernel)
        table.add_row(f"{row_in.piece_bytes // 1024} KiB", *(f"{rate:.1f}" for rate in rates))
    console.print(table)
    limits = f"{calibration.max_bytes_in} bytes in, {calibration.max_bytes_out} bytes out"
    console.print(f"the kernel copies extents of up to {limits}")


@app.command()
def demo(
    model: Annotated[Path | None, typer.Option(help="a local Hugging Face folder with its tokenizer")] = None,
    prompts: Annotated[Path | None, typer.Option(help="a text file, one prompt a line")] = None,
    requests: Annotated[int, typer.Option(min=1, help="how many requests")] = 96,
    turns: Annotated[int, typer.Option(min=1, help="turns of each conversation")] = 3,
    max_tokens: Annotated[int, typer.Option(min=1, help="tokens to generate for a request")] = 24,
    blocks: Annotated[int, typer.Option(min=1, help="blocks of the device tier")] = 768,
    block_size: Annotated[int, typer.Option(min=1, help="tokens of a block")] = 16,
    layer_layout: Annotated[str, typer.Option(help="separate or packed")] = "separate",
    sample: Annotated[int, typer.Option(min=0, help="requests to compare with model.generate")] = 6,
    seed: Annotated[int, typer.Option(help="seed of the random weights")] = 0,
    device: Annotated[str, typer.Option(help="cpu or cuda")] = "cpu",
    plot: Annotated[Path, typer.Option(help="where to draw the use of blocks over time")] = Path("kvpage-demo.png"),
    cache_dtype: Annotated[str, typer.Option(help="auto, fp32, fp16, bf16, fp8_e4m3, fp8_e5m2 or int8")] = "auto",
    store: Annotated[Path | None, typer.Option(help="keep K and V in this folder; a second run starts warm")] = None,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="run the folder's Python code")
    ] = False,
    save: Annotated[Path | None, typer.Option(help="only write a random model here, for `kvpage serve`")] = None,
) -> None:
    """Serve conversations with shared system prompts, and compare the tokens with the tokens of model.generate."""
    from kvpage.tools.demo import DemoOptions, run

    try:
        if save is not None:
            from kvpage.tools.demo_model import save_model

            save_model(save, seed)
            Console().print(f"written: {save}; now run: kvpage serve {save}", highlight=False, soft_wrap=True)
            raise typer.Exit
        options = DemoOptions(
            model, prompts, requests, turns, max_tokens, blocks, block_size, layer_layout, sample, seed, device, plot,
            cache_dtype, store, trust_remote_code,
        )  # fmt: skip
        identical = run(options, Console())
    except (ValueError, OSError) as error:
        raise SystemExit(f"kvpage demo: {error}") from error
    raise typer.Exit(0 if identical else 1)


def _requests(trace: str, hash_tokens: int) -> list["TraceRequest"]:
    """Return the requests of a file, of standard input, or of a generated trace."""
    from kvpage.tools.replay import read_trace
    from kvpage.tools.replays.eviction_report import generated

    requests = generated(trace, hash_tokens)
    if requests is not None:
        return requests
    with sys.stdin if trace == "-" else open(trace) as lines:
        return list(read_trace(lines))


@app.command()
def replay(
    trace: Annotated[str, typer.Argument(help="JSON lines in Mooncake's format; - for standard input; agents:SEED")],
    device_blocks: Annotated[int | None, typer.Option(min=1, help="blocks of the device tier")] = None,
    device_gib: Annotated[float | None, typer.Option(help="memory of the device tier; needs --model-config")] = None,
    host_blocks: Annotated[int | None, typer.Option(min=0, help="blocks of the host tier")] = None,
    host_gib: Annotated[float | None, typer.Option(help="memory of the host tier; needs --model-config")] = None,
    model_config: Annotated[Path | None, typer.Option(help="a Hugging Face config.json, or its folder")] = None,
    cache_dtype: Annotated[str, typer.Option(help="type of the cache, as CacheConfig names it")] = "auto",
    tensor_parallel_size: Annotated[int, typer.Option(min=1, help="ranks; sizes are of one rank")] = 1,
    block_size: Annotated[int, typer.Option(min=1, help="tokens of a block")] = 16,
    hash_tokens: Annotated[int, typer.Option(min=1, help="tokens of a hash id in the trace")] = 512,
    policy: Annotated[str, typer.Option(help="copy blocks to the host on_eviction or at_once")] = "on_eviction",
    eviction: Annotated[str | None, typer.Option(help="compare policies, as lru,cost,hinted,belady")] = None,
    outputs: Annotated[bool, typer.Option("--outputs", help="generated tokens occupy blocks, too")] = False,
    prefill: Annotated[float | None, typer.Option(help="tokens a second of prefill; with it, times are shown")] = None,
    bandwidth: Annotated[float, typer.Option(help="GB a second from the host to the device")] = 50.0,
    state_slots: Annotated[int, typer.Option(min=0, help="state slots of a hybrid model; one is a request's")] = 0,
    host_state_slots: Annotated[int, typer.Option(min=0, help="state slots of the host tier")] = 0,
    state_bytes: Annotated[int, typer.Option(min=0, help="bytes of a state slot")] = 0,
    checkpoint_every: Annotated[
        list[int] | None, typer.Option(help="one more replay, with a checkpoint every N tokens; may be repeated")
    ] = None,
    sweep: Annotated[str | None, typer.Option(help="for example device-gib=10:640")] = None,
    plot: Annotated[Path | None, typer.Option(help="where to draw; a sweep draws kvpage-replay.png by default")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON instead of the table")] = False,
) -> None:
    """Replay a production trace against pool, tree and tiers, and print how much memory of this size finds again."""
    from kvpage.tools.picture_file import check_picture
    from kvpage.tools.replay import ReplayConfig
    from kvpage.tools.replays import eviction_report
    from kvpage.tools.replays import replay_report as report

    def blocks(tier: str, count: int | None, gib: float | None, block_bytes: int) -> int | None:
        if count is not None and gib is not None:
            raise ValueError(f"give --{tier}-blocks or --{tier}-gib, not both")
        return count if gib is None else report.blocks_of(f"{tier}-gib", gib, block_bytes)

    try:
        swept = report.Sweep.parse(sweep) if sweep else None
        check_picture(plot or report.PICTURE)
        size = report.block_bytes_of(model_config, block_size, cache_dtype, tensor_parallel_size) if model_config else 0
        on_device = blocks("device", device_blocks, device_gib, size)
        if on_device is None and not (swept and swept.name.startswith("device")):
            raise ValueError("give --device-blocks, or --device-gib with --model-config, or sweep one of them")
        slots = state_slots or int(swept is not None and swept.name == "state-slots")
        config = ReplayConfig(
            on_device or 1, blocks("host", host_blocks, host_gib, size) or 0, block_size, hash_tokens, policy, outputs,
            size, prefill, bandwidth * 1e9, slots, host_state_slots, None, state_bytes,
        )  # fmt: skip
        policies = report.with_policies(config, checkpoint_every or [])
        configs = [point for policy in policies for point in (swept.configs(policy) if swept else [policy])]
        requests = _requests(trace, hash_tokens)
        if eviction is not None:
            names = eviction_report.parse_names(eviction)
            eviction_report.give(eviction_report.compare(names, requests, configs), plot, as_json)
            return
        reports = report.replay_all(requests, configs, Console(stderr=True))
    except (ValueError, OSError) as error:
        raise SystemExit(f"kvpage replay: {error}") from error
    report.give(swept, configs, reports, plot, as_json)


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []})
def bench(
    context: typer.Context,
    op: Annotated[str | None, typer.Argument(help="its name; without one, all are listed")] = None,
) -> None:
    """Run a microbenchmark: a bound, a peer, a table, a line of JSON. `kvpage bench OP --help` lists its options."""
    import importlib.util
    import sys

    spec = importlib.util.find_spec("kvpage.benchmarks")
    folders = [] if spec is None else list(spec.submodule_search_locations or [])
    scripts = {path.stem.removeprefix("bench_"): path for folder in folders for path in Path(folder).glob("bench_*.py")}
    if op not in scripts:
        for name, path in sorted(scripts.items()):
            print(f"{name:22} {path.read_text().splitlines()[0].strip(chr(34))}")
        if op is None or op in ("--help", "-h"):
            return
        raise SystemExit(f"kvpage bench: OP must be one of {', '.join(sorted(scripts))}, got {op!r}")
    sys.argv = [f"kvpage bench {op}", *context.args]
    try:
        script = importlib.import_module(f"kvpage.benchmarks.bench_{op}")
    except ModuleNotFoundError as error:
        raise SystemExit(f"kvpage bench {op} needs the package {error.name}, which is not installed") from error
    script.main()


def main() -> None:
    """Run the command line."""
    app()
