"""`tidekv`: the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

import tidekv

app = typer.Typer(
    help="A layer-elastic KV cache for LLM serving: under pressure pages give up layers, not requests.",
    no_args_is_help=True,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"tidekv {tidekv.__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Commands of tidekv."""


@app.command()
def demo(
    requests: Annotated[int, typer.Option(min=3, max=200, help="Requests; every third is high priority.")] = 24,
    pool: Annotated[
        float, typer.Option(min=0.1, max=1.0, help="Pool size as a share of what all requests need.")
    ] = 0.4,
    out: Annotated[Path, typer.Option(help="Folder for demo.json and demo.png.")] = Path("out"),
    seed: Annotated[int, typer.Option(help="Seed of the workload.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON instead of a table.")] = False,
) -> None:
    """Serve real requests on a real model in a pool that is far too small, and compare with the usual policy.

    Runs SmolLM2-135M-Instruct on the CPU three times: with ample memory, with tidekv's `narrow`, and with `retract`.
    Exits with 1 if narrowing changed an answer, retracted or recomputed anything, or if the books do not add up at
    the end.
    """
    from tidekv.demo import run_demo
    from tidekv.errors import ConfigError

    console = Console()
    try:
        code = run_demo(console, out, requests, pool, seed, as_json)
    except ConfigError as error:
        Console(stderr=True).print(f"error: {error}", style="bold red", highlight=False)
        code = 2
    except KeyboardInterrupt:
        Console(stderr=True).print("interrupted; nothing was written", style="yellow")
        code = 130
    raise typer.Exit(code)


@app.command()
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print as JSON.")] = False,
) -> None:
    """Say what this machine can do: torch, CUDA, Triton, pinned memory, the packaged model, and what follows."""
    from tidekv.doctor import print_report

    print_report(Console(), as_json)
