"""What the lossy read mode `window` costs in fidelity, on the packaged model and on given text.

    python -m benchmarks.fidelity TEXT.jsonl --out DIR     TEXT.jsonl: one {"text": ...} a line

Layers that are not resident at a width see the first 16 tokens (the sink page) and the last W; resident layers see
everything. Here with attention masks, token by token and with every old page narrow: the worst that the engine's window
can come to, which narrows whole pages, and only under pressure. Rows:

    perplexity   over tokens [W0, T) of each document, W0 the largest window, so that every row scores the same tokens
    changed      share of those positions at which the most likely next token is another than at full width
    needles      a number stated early in a long prompt, asked for at its end: how many are answered in full
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from tidekv.engine.model import LoadedModel, forward_packed, load_model
from tidekv.geometry import KVGeometry

SINK_TOKENS = 16
WINDOWS = (64, 256, 1024)


@dataclass(frozen=True)
class Row:
    """One way of reading. width None: everything, in every layer."""

    width: int | None
    window: int | None
    perplexity: float
    changed: float
    needles: int
    needles_of: int


class MaskedReads:
    """An attention context without a cache: one sequence, whose non-resident layers see the sinks and a window."""

    def __init__(self, length: int, resident: frozenset[int] | None, window: int | None) -> None:
        self.resident = resident
        at = torch.arange(length)
        causal = at[None, :] <= at[:, None]
        self.window_mask = causal
        if window is not None:
            self.window_mask = causal & ((at[None, :] < SINK_TOKENS) | (at[None, :] > at[:, None] - window))

    def forward(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float) -> torch.Tensor:
        """q [T, Hq, D], k and v [T, Hkv, D] -> [T, Hq, D]."""
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        if self.resident is None or layer in self.resident:
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=True)
        else:
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=self.window_mask, scale=scaling, enable_gqa=True)
        return out[0].transpose(0, 1)


def logits_of(
    loaded: LoadedModel, ids: list[int], rows: torch.Tensor, width: int | None, window: int | None
) -> torch.Tensor:
    """Next-token logits [R, V] of one sequence, read in one way."""
    resident = None
    if width is not None:
        shape = KVGeometry(loaded.layer_num, 1, 16, loaded.num_kv_heads, loaded.head_dim, torch.float32)
        resident = frozenset(shape.resident_layers(width))
    context = MaskedReads(len(ids), resident, window)
    return forward_packed(loaded.model, torch.tensor(ids), torch.arange(len(ids)), rows, context).float()


def needle_prompts(loaded: LoadedModel, texts: list[str], count: int, length: int) -> list[tuple[list[int], list[int]]]:
    """(prompt, answer) token ids: a code stated after about 100 tokens, asked for at the end."""
    rng = random.Random(0)
    assert loaded.tokenizer is not None
    prompts = []
    for i in range(count):
        code = str(rng.randrange(10_000, 100_000))
        filler = list(loaded.tokenizer(texts[i % len(texts)][20_000:60_000])["input_ids"])
        fact = list(loaded.tokenizer(f"\n\nRemember this: the secret access code is {code}.\n\n")["input_ids"])
        ask = list(loaded.tokenizer("\n\nTo repeat what was said above: the secret access code is")["input_ids"])
        answer = list(loaded.tokenizer(f" {code}")["input_ids"])
        body = filler[:100] + fact + filler[100 : length - len(fact) - len(ask)]
        prompts.append((body + ask, answer))
    return prompts


Way = tuple[int | None, int | None]  # (width, window); (None, None): everything, in every layer


def document_figures(
    loaded: LoadedModel, ids: list[int], first_scored: int, ways: list[Way]
) -> list[tuple[float, int]]:
    """(sum of losses, positions whose most likely next token differs from full width's) of one document, each way."""
    at = torch.arange(first_scored, len(ids) - 1)
    figures, full = [], None
    for width, window in ways:
        logits = logits_of(loaded, ids, at, width, window)
        best = logits.argmax(-1)
        full = best if full is None else full
        loss = float(F.cross_entropy(logits, torch.tensor(ids)[at + 1], reduction="sum"))
        figures.append((loss, int((best != full).sum())))
    return figures


def needle_figures(loaded: LoadedModel, prompt: list[int], answer: list[int], ways: list[Way]) -> list[bool]:
    """Whether the whole answer is the most likely one, each way."""
    at = torch.arange(len(prompt) - 1, len(prompt) + len(answer) - 1)
    return [logits_of(loaded, prompt + answer, at, *way).argmax(-1).tolist() == answer for way in ways]


def summary(done: dict[str, Any], ways: list[Way], scored: int) -> list[Row]:
    """One row a way, over the documents and needles that are done."""
    documents = [done["documents"][key] for key in sorted(done["documents"], key=int)]
    needles = [done["needles"][key] for key in sorted(done["needles"], key=int)]
    rows = []
    for i, (width, window) in enumerate(ways):
        tokens = max(1, scored * len(documents))
        losses, changed = (sum(figures[i][j] for figures in documents) for j in (0, 1))
        rows.append(
            Row(width, window, math.exp(losses / tokens), changed / tokens, sum(n[i] for n in needles), len(needles))
        )
    return rows


def main(arguments: list[str]) -> int:
    """All rows go to DIR/fidelity.json after each document and needle; the same command goes on from there."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fidelity", description=__doc__.splitlines()[0])
    parser.add_argument("text", type=Path, help='JSONL with a "text" field')
    parser.add_argument("--out", type=Path, default=Path("out"))
    parser.add_argument("--documents", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=2048, help="context a document, at most the model's")
    parser.add_argument("--needles", type=int, default=16)
    parser.add_argument("--needle-tokens", type=int, default=1500)
    parser.add_argument("--model", default="smollm2", help="a model with a tokenizer")
    options = parser.parse_args(arguments)
    if options.tokens <= max(WINDOWS) + 1:
        parser.error(f"--tokens must be above {max(WINDOWS) + 1}, the largest window")
    texts = [json.loads(line)["text"] for line in options.text.read_text(encoding="utf-8").splitlines()]
    loaded = load_model(options.model, "cpu", torch.float32)
    assert loaded.tokenizer is not None
    documents = [list(loaded.tokenizer(text[:20_000])["input_ids"])[: options.tokens] for text in texts]
    documents = [ids for ids in documents if len(ids) == options.tokens][: options.documents]
    widths = (loaded.layer_num // 2, loaded.layer_num // 4)
    ways: list[Way] = [(None, None)]
    ways += [(width, window) for width in widths for window in WINDOWS]
    needles = needle_prompts(loaded, texts, options.needles, options.needle_tokens)
    about = {
        "model": options.model,
        "layers": loaded.layer_num,
        "tokens": options.tokens,
        "scored_from": max(WINDOWS),
        "needle_tokens": options.needle_tokens,
        "sink_tokens": SINK_TOKENS,
    }
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / "fidelity.json"
    done: dict[str, Any] = {"documents": {}, "needles": {}}
    if path.is_file():
        before = json.loads(path.read_text())
        if before["about"] != about:
            parser.error(f"{path} was made with other options: {before['about']}; give another --out")
        done = before["done"]
    jobs = [(kind, i) for i in range(max(len(documents), len(needles))) for kind in ("documents", "needles")]
    for kind, i in jobs:  # by turns, so that a run that is cut short has some of both
        if i >= len(documents if kind == "documents" else needles) or str(i) in done[kind]:
            continue
        started_s = time.perf_counter()
        if kind == "documents":
            done[kind][str(i)] = document_figures(loaded, documents[i], max(WINDOWS), ways)
        else:
            done[kind][str(i)] = needle_figures(loaded, *needles[i], ways)
        rows = [asdict(row) for row in summary(done, ways, options.tokens - 1 - max(WINDOWS))]
        part = path.with_suffix(".part")
        part.write_text(json.dumps({"about": about, "rows": rows, "done": done}, indent=1) + "\n")
        part.replace(path)
        print(json.dumps({"done": f"{kind} {i}", "s": round(time.perf_counter() - started_s, 1)}), flush=True)
    for row in json.loads(path.read_text())["rows"]:
        print(json.dumps(row))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
