"""The command line: `kvpage info` and `kvpage demo`. It needs the extra `serve`."""

from pathlib import Path
from typing import Annotated

try:
    import typer
    from rich.console import Console
    from rich.table import Table
except ModuleNotFoundError as error:
    raise SystemExit(f"the command line needs the extra 'serve': pip install 'kvpage[serve]' ({error})") from error

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


@app.callback()
def kvpage() -> None:
    """The paged KV cache of a language-model server."""


@app.command()
def info(
    calibrate: Annotated[bool, typer.Option(help="also measure how swaps are best copied on the CUDA device")] = False,
) -> None:
    """What was built and what was found."""
    from kvpage.build import build_info

    table = Table("what", "found", title="kvpage")
    for name, value in build_info().items():
        table.add_row(name, "none" if value is None else str(value))
    Console().print(table)
    if calibrate:
        _print_calibration(Console())


def _print_calibration(console: Console) -> None:
    from kvpage.calibration import calibrate

    try:
        found = calibrate()
    except RuntimeError as error:
        console.print(f"no calibration: {error}")
        return
    title = f"swaps on {found.device}, GB/s; the kernel on {found.max_groups} thread groups; {found.seconds:.2f} s"
    table = Table("pieces of", "in: engine", "in: kernel", "out: engine", "out: kernel", title=title)
    for row_in, row_out in zip(found.swap_in, found.swap_out, strict=True):
        rates = (row_in.engine, row_in.kernel, row_out.engine, row_out.kernel)
        table.add_row(f"{row_in.piece_bytes // 1024} KiB", *(f"{rate:.1f}" for rate in rates))
    console.print(table)
    console.print(f"the kernel copies extents of up to {found.max_bytes_in} bytes in, {found.max_bytes_out} bytes out")


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
    sample: Annotated[int, typer.Option(min=0, help="requests to compare with model.generate")] = 12,
    seed: Annotated[int, typer.Option(help="of the random weights")] = 0,
    device: Annotated[str, typer.Option(help="cpu or cuda")] = "cpu",
    plot: Annotated[Path, typer.Option(help="where to draw the use of blocks over time")] = Path("kvpage-demo.png"),
    cache_dtype: Annotated[str, typer.Option(help="auto, fp32, fp16, bf16, fp8_e4m3, fp8_e5m2 or int8")] = "auto",
) -> None:
    """Serves conversations with shared system prompts, and shows that the tokens are those of model.generate."""
    from kvpage.demo import DemoOptions, run

    try:
        options = DemoOptions(
            model, prompts, requests, turns, max_tokens, blocks, block_size, layer_layout, sample, seed, device, plot,
            cache_dtype,
        )  # fmt: skip
        identical = run(options, Console())
    except (ValueError, OSError) as error:
        raise SystemExit(f"kvpage demo: {error}") from error
    raise typer.Exit(0 if identical else 1)


def main() -> None:
    app()
