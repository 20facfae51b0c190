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


@app.command()
def replay(
    trace: Annotated[Path, typer.Argument(help="JSONL or .jsonl.gz with t, in, out, prio and, if known, hash_ids.")],
    pressure: Annotated[
        str, typer.Option(help="Policies to run side by side, with commas between them.")
    ] = "narrow,reserve,retract,swap,unlimited",
    capacity: Annotated[
        str, typer.Option(help="Pool: tokens (120000), or a share (0.5) of the trace's peak in unlimited memory.")
    ] = "0.5",
    executor: Annotated[str, typer.Option(help="model (virtual clock, no forward) or real (wall clock).")] = "model",
    model_preset: Annotated[str, typer.Option(help="Shape for the cost model.")] = "llama-3.1-8b",
    machine: Annotated[str, typer.Option(help="Rates for the cost model.")] = "H200",
    real_model: Annotated[str, typer.Option(help="What the real executor loads: smollm2, random:SHAPE, a folder.")] = (
        "smollm2"
    ),
    duration: Annotated[float | None, typer.Option(help="Only arrivals of the first so many seconds.")] = None,
    high_rate: Annotated[float, typer.Option(help="Arrivals of high priority come so many times as fast.")] = 1.0,
    low_rate: Annotated[float, typer.Option(help="Arrivals of low priority come so many times as fast.")] = 1.0,
    high_reads: Annotated[
        str, typer.Option(help="exact; or window, LOSSY: old tokens are seen in the resident layers only.")
    ] = "exact",
    low_reads: Annotated[str, typer.Option(help="The same for low priority.")] = "exact",
    window: Annotated[int, typer.Option(min=1, help="Most recent tokens that a window reads in every layer.")] = 1024,
    page_size: Annotated[int, typer.Option(min=1, help="Tokens a page.")] = 64,
    prefill_chunk: Annotated[int, typer.Option(min=1, help="Prompt tokens a step at most.")] = 2048,
    max_running: Annotated[int, typer.Option(min=1, help="Requests that hold memory at a time.")] = 256,
    prefix_cache: Annotated[bool, typer.Option(help="Keep the prefixes of finished requests.")] = True,
    out: Annotated[Path, typer.Option(help="Folder for report.json and the plots.")] = Path("out/replay"),
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON instead of a table.")] = False,
) -> None:
    """Replay a request trace through the real scheduler, allocator and prefix cache, once for each policy.

    Ctrl-C keeps what is done: the report then holds the runs so far.
    """
    import json

    from tidekv.errors import ConfigError
    from tidekv.replay import report
    from tidekv.replay.command import parse_capacity, run_with_progress
    from tidekv.replay.run import ReplayConfig

    errors = Console(stderr=True)
    try:
        config = ReplayConfig(
            capacity=parse_capacity(capacity),
            executor=executor,  # type: ignore[arg-type]
            machine=machine,
            model=model_preset,
            real_model=real_model,
            high_reads=high_reads,  # type: ignore[arg-type]
            low_reads=low_reads,  # type: ignore[arg-type]
            window_tokens=window,
            page_size=page_size,
            prefill_chunk=prefill_chunk,
            max_running=max_running,
            prefix_cache=prefix_cache,
        )
        policies = [name.strip() for name in pressure.split(",") if name.strip()]
        result = run_with_progress(trace, policies, config, errors, duration, high_rate, low_rate)
    except ConfigError as error:
        errors.print(f"error: {error}", style="bold red", highlight=False)
        raise typer.Exit(2) from error
    except KeyboardInterrupt:
        errors.print("interrupted before anything was done", style="yellow")
        raise typer.Exit(130) from None
    paths = report.write_report(result, out)
    if as_json:
        print(json.dumps(report.report(result)))
    else:
        console = Console()
        report.print_table(result, console)
        console.print("written: " + ", ".join(map(str, paths)), highlight=False, soft_wrap=True)
    raise typer.Exit(130 if any(run.interrupted for run in result.runs) else 0)
