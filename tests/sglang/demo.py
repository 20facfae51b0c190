"""Three SGLang servers, one after another, answer the same 12 requests: `make sglang-demo`.

    ample      stock, memory for everything: the reference answers
    stock      stock, a pool of 40 % of the need: it retracts requests and computes them again
    tidekv     the same pool and command line, with TIDEKV_SGLANG=1

fp32 and greedy, so answers can be compared. The exit code says whether all that the table claims held.

Stock runs with pages of 1 token, which makes the most of its pool: its kernels for larger pages need a GPU. tidekv has
pages of 16.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from model_folder import model_folder
from serving import Answer, Ask, Server, serve

HIGH, LOW = 10, 0
AMPLE_POOL = 16384  # tokens
SHARE = 0.40  # of the need, for the small pool
PAGE_SIZE = 16
OVERCOMMIT = 3.0
TOPICS = (
    "the tides of the sea", "a lighthouse keeper", "how bread is made", "the first railways", "a garden in winter",
    "the history of maps", "why the sky is blue", "a long walk home", "the sound of rain", "an old library",
    "how bridges stand", "the colours of autumn",
)  # fmt: skip
SENTENCE = "Chapter {n} of the book about {topic} tells what happened on day {n}, and what people thought of it. "


@dataclass
class Outcome:
    """What one server did. latency: seconds of each request."""

    name: str
    seconds: float
    answers: list[Answer]
    retractions: int
    halvings: int
    restores: int
    window_pages: int


def workload(num_requests: int = 12, max_tokens: int = 80) -> list[Ask]:
    """Every third request is high. Prompts of 120 to 280 tokens, different from the first one on."""
    asks = []
    for i in range(num_requests):
        sentences = 5 + (5 * i) % 7
        text = "".join(SENTENCE.format(n=n + 1 + i, topic=TOPICS[i % len(TOPICS)]) for n in range(sentences))
        asks.append(Ask(f"Story number {i}. {text}The next chapter begins:", max_tokens, HIGH if i % 3 == 0 else LOW))
    return asks


def run(name: str, asks: list[Ask], model: Path, logs: Path, pool: int, tide: dict[str, str] | None = None) -> Outcome:
    """Start a server, ask, stop it."""
    say(f"{name}: starting ({pool} tokens)")
    with serve(name, model, logs, pool, PAGE_SIZE if tide else 1, tide) as server:
        return ask(server, asks)


def ask(server: Server, asks: list[Ask]) -> Outcome:
    """Ask a running server; what it did is read from its own counters, at /metrics."""
    say(f"{server.name}: up, {len(asks)} requests")
    begin, done = time.monotonic(), 0

    def count(_: int) -> None:
        nonlocal done
        done += 1
        say(f"{server.name}: {done} of {len(asks)} answered, {time.monotonic() - begin:.0f} s")

    answers = server.ask_all(asks, count)
    seconds = time.monotonic() - begin
    server.wait_idle()
    return Outcome(
        server.name,
        seconds,
        answers,
        int(server.metric("sglang:num_retracted_requests_total")),
        int(server.metric("tidekv:halvings_total")),
        int(server.metric("tidekv:restores_total")),
        int(server.metric("tidekv:window_pages_total")),
    )


def say(text: str) -> None:
    print(f"  {text}", file=sys.stderr, flush=True)


def small_pool(asks: list[Ask], model: Path) -> int:
    """Tokens: 40 % of what the requests need, in whole pages. No answer of the demo ends early."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    need = sum(len(tokenizer(ask.prompt)["input_ids"]) + ask.max_tokens for ask in asks)
    small = int(SHARE * need) // PAGE_SIZE * PAGE_SIZE
    say(f"the {len(asks)} requests need {need} tokens; the small pool has {small}")
    return small


def table(outcomes: list[Outcome], asks: list[Ask], reference: list[Answer]) -> str:
    """One row a server."""
    rows = [("server", "seconds", "retractions", "answers changed", "halvings", "high: median s", "high: worst s")]
    for o in outcomes:
        high = sorted(a.seconds for a, ask in zip(o.answers, asks, strict=True) if ask.priority == HIGH)
        changed = sum(a.text != b.text for a, b in zip(o.answers, reference, strict=True))
        rows.append((
            o.name, f"{o.seconds:.1f}", str(o.retractions), str(changed), str(o.halvings),
            f"{high[len(high) // 2]:.1f}", f"{high[-1]:.1f}",
        ))  # fmt: skip
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    return "\n".join([lines[0], "  ".join("-" * width for width in widths), *lines[1:]])


def judge(ample: Outcome, stock: Outcome, tide: Outcome) -> list[str]:
    """What did not hold; empty if all did."""
    reference = [a.text for a in ample.answers]
    claims = (
        (ample.retractions == 0, f"the reference server retracted {ample.retractions} requests"),
        (stock.retractions > 0, "stock retracted nothing: the pool is not small enough to show anything"),
        (tide.retractions == 0, f"tidekv retracted {tide.retractions} requests"),
        (tide.halvings > 0, "tidekv narrowed nothing: the pool is not small enough to show anything"),
        ([a.text for a in tide.answers] == reference, "tidekv changed answers"),
        (all(a.completion_tokens for a in tide.answers), "tidekv gave an empty answer"),
    )
    return [message for held, message in claims if not held]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--logs", type=Path, default=Path("out/sglang"), help="folder for the servers' logs")
    logs = parser.parse_args().logs.resolve()
    model, asks = model_folder(), workload()
    ample = run("ample", asks, model, logs, AMPLE_POOL)
    small = small_pool(asks, model)
    stock = run("stock", asks, model, logs, small)
    tide = run("tidekv", asks, model, logs, small, {"TIDEKV_SGLANG": "1", "TIDEKV_OVERCOMMIT": str(OVERCOMMIT)})
    print(table([ample, stock, tide], asks, ample.answers))
    faults = judge(ample, stock, tide)
    for fault in faults:
        print(f"FAILED: {fault}")
    print("" if faults else "All of it held: no retraction, no changed answer, on 40 % of the memory.")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
