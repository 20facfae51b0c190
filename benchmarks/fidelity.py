"""What the lossy read mode `window` costs in fidelity, on the packaged model and on given text.

    python -m benchmarks.fidelity TEXT.jsonl --out DIR     TEXT.jsonl: one {"text": ...} a line

Every way of reading (benchmarks/masked_reads.py) sees the same inputs:

    documents   pieces of the texts: perplexity over positions from W0 on, W0 the largest window, so that every way
                scores the same tokens; and at how many of them the most likely next token is not full width's
    answers     the same pieces as prompts, continued greedily: how many continuations differ from full width's, where
    needles     a code stated at some depth of a long prompt and asked for at its end: how many are answered in full;
                and, at full width, the same prompt without the statement

Results go to DIR/fidelity.json after each batch; the same command goes on from there. DIR/tables.md is made from it.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.fidelity_tables import tables
from benchmarks.masked_reads import SINK_TOKENS, Way, greedy, logits_of
from tidekv.engine.model import LoadedModel, load_model

WINDOWS = (64, 256, 1024)
DEPTHS = (0.1, 0.3, 0.5, 0.7, 0.9)  # needle i lies at DEPTHS[i % 5] of its prompt
Job = tuple[str, int, Callable[[], list[Any]]]  # (group, number of its first item, a result for each item)


def ways_of(loaded: LoadedModel) -> list[Way]:
    """Full width; the same through a mask that hides nothing, which shows what rounding alone does; the windows."""
    widths = (loaded.layer_num // 2, loaded.layer_num // 4)
    full = [Way(None, None), Way(widths[0], None)]
    return full + [Way(width, window) for width in widths for window in WINDOWS]


def pieces(streams: list[list[int]], length: int, count: int) -> list[list[int]]:
    """The first `count` pieces of `length` tokens, one of each text by turns; none crosses from a text to another."""
    cut = [[ids[at : at + length] for at in range(0, len(ids) - length + 1, length)] for ids in streams]
    turns = max((len(of_text) for of_text in cut), default=0)
    return [of_text[turn] for turn in range(turns) for of_text in cut if turn < len(of_text)][:count]


def needle_prompts(
    loaded: LoadedModel, stream: list[int], count: int, length: int
) -> list[tuple[list[int], list[int], list[int]]]:
    """(prompt, the same without the statement, answer) in token ids; both prompts have `length` tokens."""
    assert loaded.tokenizer is not None
    rng = random.Random(length)
    prompts = []
    for i in range(count):
        code = str(rng.randrange(10_000, 100_000))
        fact, ask, answer = (
            list(loaded.tokenizer(text)["input_ids"])
            for text in (
                f"\n\nRemember this: the secret access code is {code}.\n\n",
                "\n\nTo repeat what was said above: the secret access code is",
                f" {code}",
            )
        )
        start = rng.randrange(len(stream) - length)
        filler = stream[start : start + length - len(ask)]
        at = int((len(filler) - len(fact)) * DEPTHS[i % len(DEPTHS)])
        prompts.append((filler[:at] + fact + filler[at : len(filler) - len(fact)] + ask, filler + ask, answer))
    return prompts


def document_figures(loaded: LoadedModel, ids: Tensor, first_scored: int, ways: list[Way]) -> list[Any]:
    """For each of ids [n, T] and each way: [sum of losses, positions whose most likely next token is another than at
    full width]."""
    at = torch.arange(first_scored, ids.shape[1] - 1, device=ids.device)
    figures: list[list[list[float]]] = [[] for _ in ids]
    full: Tensor | None = None
    for way in ways:
        logits = logits_of(loaded, ids, at, way)
        best = logits.argmax(-1)
        full = best if full is None else full
        loss = F.cross_entropy(logits.flatten(0, 1), ids[:, at + 1].flatten(), reduction="none").view_as(best)
        changed = (best != full).sum(-1)
        for of_item, *pair in zip(figures, loss.double().sum(-1).tolist(), changed.tolist(), strict=True):
            of_item.append(pair)
    return figures


def answer_figures(loaded: LoadedModel, prompts: Tensor, steps: int, ways: list[Way]) -> list[Any]:
    """For each of prompts [n, T] and each way: number of the first answer token that is not full width's, or None."""
    answers = torch.stack([greedy(loaded, prompts, steps, way) for way in ways], dim=1)  # [n, ways, steps]
    differs = (answers != answers[:, :1]).tolist()
    return [[row.index(True) if True in row else None for row in of_item] for of_item in differs]


def needle_figures(
    loaded: LoadedModel, items: list[tuple[list[int], list[int], list[int]]], ways: list[Way]
) -> list[Any]:
    """For each item: [whether the whole answer is the most likely one, each way, then at full width without the
    statement]. Answers of a batch are of one length."""
    device = loaded.model.device
    want = torch.tensor([answer for _, _, answer in items], device=device)
    found = []
    for which, way in [(0, way) for way in ways] + [(1, ways[0])]:
        ids = torch.tensor([item[which] + item[2] for item in items], device=device)
        at = torch.arange(ids.shape[1] - want.shape[1] - 1, ids.shape[1] - 1, device=device)
        found.append((logits_of(loaded, ids, at, way).argmax(-1) == want).all(-1))
    return torch.stack(found, dim=1).tolist()


def jobs_of(loaded: LoadedModel, texts: list[str], options: argparse.Namespace, ways: list[Way]) -> list[Job]:
    """All batches, the groups by turns, so that a run that is cut short has some of each."""
    assert loaded.tokenizer is not None
    device = loaded.model.device
    streams = [list(loaded.tokenizer(text)["input_ids"]) for text in texts]
    stream = [token for ids in streams for token in ids]
    groups: list[tuple[str, list[Any], int, Callable[[list[Any]], list[Any]]]] = []  # name, items, tokens, figures
    for length in options.tokens:
        items = pieces(streams, length, options.documents)
        groups.append(
            (
                f"documents {length}",
                items,
                length,
                lambda part: document_figures(loaded, torch.tensor(part, device=device), max(WINDOWS), ways),
            )
        )
    groups.append(
        (
            f"answers {options.tokens[0]}",
            pieces(streams, options.tokens[0], options.answers),
            options.tokens[0] // 4,  # only the last position's logits are made
            lambda part: answer_figures(loaded, torch.tensor(part, device=device), options.answer_tokens, ways),
        )
    )
    for length in options.needle_tokens:
        needles = needle_prompts(loaded, stream, options.needles, length)
        groups.append((f"needles {length}", needles, length, lambda part: needle_figures(loaded, part, ways)))
    jobs: list[tuple[float, Job]] = []
    for name, items, tokens, figures in groups:
        size = max(1, options.batch_tokens // tokens)
        for first in range(0, len(items), size):
            part = items[first : first + size]
            job: Job = (name, first, lambda figures=figures, part=part: figures(part))
            jobs.append(((first + len(part)) / len(items), job))
    return [job for _, job in sorted(jobs, key=lambda pair: pair[0])]


def parse(arguments: list[str]) -> argparse.Namespace:
    """The options; an error message for those that cannot be."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fidelity", description=__doc__.splitlines()[0])
    parser.add_argument("text", type=Path, help='JSONL with a "text" field')
    parser.add_argument("--out", type=Path, default=Path("out"))
    parser.add_argument("--model", default="smollm2", help="a model with a tokenizer")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--documents", type=int, default=8, help="of each length; fewer if the texts end")
    parser.add_argument("--tokens", type=int, nargs="+", default=[2048], help="lengths, at most the model's context")
    parser.add_argument("--answers", type=int, default=8, help="prompts of the first length, continued greedily")
    parser.add_argument("--answer-tokens", type=int, default=64)
    parser.add_argument("--needles", type=int, default=15, help="of each length; 5 depths by turns")
    parser.add_argument("--needle-tokens", type=int, nargs="+", default=[1400])
    parser.add_argument("--batch-tokens", type=int, default=0, help="default: 32,768 on CUDA, one sequence on a CPU")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start no batch after this")
    options = parser.parse_args(arguments)
    if min(options.tokens) <= max(WINDOWS) + 1:
        parser.error(f"--tokens {min(options.tokens)}: must be above {max(WINDOWS) + 1}, the largest window")
    if not options.batch_tokens:
        # 4 documents of 8,192 have 1.4e9 logits in a vocabulary of 49,152: below 2**31.
        options.batch_tokens = 32_768 if options.device.startswith("cuda") else 1
    return options


def main(arguments: list[str]) -> int:
    """Runs what is not done yet; 0 if everything is."""
    started_s = time.perf_counter()
    options = parse(arguments)
    texts = [json.loads(line)["text"] for line in options.text.read_text(encoding="utf-8").splitlines()]
    loaded = load_model(options.model, options.device, torch.float32)
    ways = ways_of(loaded)
    about = {
        "layers": loaded.layer_num,
        "ways": [[way.width, way.window] for way in ways],
        "scored_from": max(WINDOWS),
        "sink_tokens": SINK_TOKENS,
        "answer_tokens": options.answer_tokens,
        "depths": DEPTHS,
    }
    about = json.loads(json.dumps(about))  # as it reads back
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / "fidelity.json"
    done: dict[str, dict[str, Any]] = {}
    if path.is_file():
        before = json.loads(path.read_text())
        if before["about"] != about:
            print(f"{path} was made with other options: {before['about']}; give another --out", file=sys.stderr)
            return 2
        done = before["done"]
    jobs = jobs_of(loaded, texts, options, ways)
    for number, (group, first, figures) in enumerate(jobs, start=1):
        of_group = done.setdefault(group, {})
        if str(first) in of_group:
            continue
        if time.perf_counter() - started_s > options.seconds:
            print(f"stopped after {options.seconds:g} s, with {len(jobs) - number + 1} batches to do: run it again")
            return 3
        began_s = time.perf_counter()
        of_group.update({str(first + i): figure for i, figure in enumerate(figures())})
        part = path.with_suffix(".part")
        part.write_text(json.dumps({"about": about, "done": done}) + "\n")
        part.replace(path)
        (options.out / "tables.md").write_text(tables(about, done))
        took_s = time.perf_counter() - began_s
        print(f"{number} of {len(jobs)}: {group}, from {first}: {took_s:.1f} s", flush=True)
    print(tables(about, done))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
