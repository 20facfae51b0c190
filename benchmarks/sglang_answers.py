"""Answers of different engines compared where rounding differs: what each run said, scored by one engine of its own.

In bf16 two runs that are both right give different answers: other batches take other kernels, and a tie between two
tokens falls the other way. So answers are not only compared. A stock engine reads prompt and answer in one prefill
(teacher forcing) and says for every position of the answer how likely each token was, given the text before it:

    gap     its most likely token's log-probability less that of the token that was chosen: 0 if it chooses the same
    drift   | log-probability of the chosen token when it was decoded, less the scorer's |

Rounding moves both a little. KV that was lost, moved to the wrong place or read too early moves them much, from there
on. The floor is stock SGLang itself in the same small pool: other batches, retractions, KV computed again.

The model is written on the spot. Its weights are large enough that every key matters: logits of attention spread by 2,
so that about a tenth of 600 keys carry a head, and what attention adds is most of the residual stream. So a page of 64
tokens that reads its neighbour's KV in a single layer moves drift by 0.25 (gap 0.25), where bf16 alone moves it by 0.08
at most (gap 0.06): benchmarks/results/2026-12-01-h200/sglang_answers.json, controls of `sglang_rescore`.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

LAYERS, PAGE = 8, 64
# Runs that mean something to the judge: who is compared with, how much rounding does, and two that must not pass.
REFERENCE, FLOOR, FAULT = "stock, ample", "stock, small", "tidekv, small, overlap, a fault planted"
DAMAGED = "scored after prompts with a page of other tokens"
ANSWERS = "answers.json.gz"  # what was said and scored, by run
# tidekv's figure may be 1.25 times stock's: the largest of 16k positions differs as much between two runs that are
# right. And 0.05 more, for pools so ample that stock's floor is nothing (fp32).
FACTOR, SLACK = 1.25, 0.05
JUDGED = ("gap_p99", "gap_max", "drift_p99", "drift_max")


@dataclass(frozen=True)
class Load:
    """num_requests at once, a third of them high; every second one shares its first half with three others."""

    num_requests: int = 64
    prompt: int = 512
    output: int = 256
    vocab: int = 32_000

    def prompts(self, seed: int = 5) -> list[list[int]]:
        """Token ids, the same for every engine."""
        rng = random.Random(seed)
        half = self.prompt // 2
        shared = [self._tokens(rng, half) for _ in range(max(1, self.num_requests // 8))]
        out = []
        for index in range(self.num_requests):
            begin = shared[index // 2 % len(shared)] if index % 2 else self._tokens(rng, half)
            out.append(begin + self._tokens(rng, self.prompt - half))
        return out

    def damaged(self) -> list[list[int]]:
        """The prompts with one page of other tokens in the middle: what a run reads whose KV of that page is wrong."""
        rng = random.Random(6)
        begin, size = self.prompt // 2, min(PAGE, self.prompt // 4)
        return [ids[:begin] + self._tokens(rng, size) + ids[begin + size :] for ids in self.prompts()]

    def _tokens(self, rng: random.Random, count: int) -> list[int]:
        return [rng.randrange(100, self.vocab - 100) for _ in range(count)]


FULL = Load()
SMOKE = Load(num_requests=16, prompt=64, output=48, vocab=2048)


def write_model(folder: Path, smoke: bool) -> None:
    """A Llama of 8 layers with seeded random weights in bf16, 2 GB: heads, head_dim and hidden size are those of
    Llama-3.1-8B, so that every kernel compiled for it serves. smoke: 64 channels in fp32."""
    import torch
    from safetensors.torch import save_file
    from transformers import LlamaConfig

    hidden, heads, kv_heads, dim, inner = (64, 4, 2, 16, 96) if smoke else (4096, 32, 8, 128, 4096)
    vocab, dtype = (SMOKE.vocab, torch.float32) if smoke else (FULL.vocab, torch.bfloat16)
    generator = torch.Generator().manual_seed(0)  # a CPU's: another machine can make the same model again

    def weight(out: int, fan_in: int, gain: float) -> torch.Tensor:
        """Maps values that spread by 1 to values that spread by `gain`."""
        return (torch.randn(out, fan_in, generator=generator) * (gain / math.sqrt(fan_in))).to(dtype)

    ones = torch.ones(hidden, dtype=dtype)
    tensors = {
        "model.embed_tokens.weight": weight(vocab, hidden, math.sqrt(hidden)),
        "model.norm.weight": ones.clone(),
        "lm_head.weight": weight(vocab, hidden, 2.0),
    }
    for layer in range(LAYERS):
        attention, mlp = f"model.layers.{layer}.self_attn", f"model.layers.{layer}.mlp"
        tensors |= {
            f"{attention}.q_proj.weight": weight(heads * dim, hidden, math.sqrt(2)),
            f"{attention}.k_proj.weight": weight(kv_heads * dim, hidden, math.sqrt(2)),
            f"{attention}.v_proj.weight": weight(kv_heads * dim, hidden, 1.0),
            f"{attention}.o_proj.weight": weight(hidden, heads * dim, 4.0),
            f"{mlp}.gate_proj.weight": weight(inner, hidden, 1.0),
            f"{mlp}.up_proj.weight": weight(inner, hidden, 1.0),
            f"{mlp}.down_proj.weight": weight(hidden, inner, 1.0),
            f"model.layers.{layer}.input_layernorm.weight": ones.clone(),
            f"model.layers.{layer}.post_attention_layernorm.weight": ones.clone(),
        }
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    LlamaConfig(
        vocab_size=vocab, hidden_size=hidden, intermediate_size=inner, num_hidden_layers=LAYERS,
        num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=dim, max_position_embeddings=4096,
        tie_word_embeddings=False, architectures=["LlamaForCausalLM"], torch_dtype=str(dtype).removeprefix("torch."),
    ).save_pretrained(folder)  # fmt: skip
    text = json.loads((folder / "config.json").read_text())
    text["rope_theta"] = 10000.0  # where loaders before transformers 5 look
    (folder / "config.json").write_text(json.dumps(text))


# ---- in the child: one engine ----------------------------------------------------------------------------------------


def answer(engine: Any, load: Load, high: int, low: int) -> dict[str, Any]:
    """Greedy answers to all prompts at once: tokens and their log-probabilities when they were decoded."""
    sampling = {"temperature": 0, "max_new_tokens": load.output, "ignore_eos": True}

    async def one(index: int, ids: list[int]) -> Any:
        priority = high if index % 3 == 0 else low
        return await engine.async_generate(
            input_ids=ids, sampling_params=sampling, return_logprob=True, priority=priority
        )

    async def every() -> list[Any]:
        return await asyncio.gather(*(one(i, ids) for i, ids in enumerate(load.prompts())))

    outputs = engine.loop.run_until_complete(every())
    metas = [out["meta_info"] for out in outputs]
    counts = [meta.get("num_retractions") or 0 for meta in metas]
    return {
        "retractions": sum(counts),
        "answers": [out["output_ids"] for out in outputs],
        "logprobs": [[round(float(chosen[0]), 5) for chosen in meta["output_token_logprobs"]] for meta in metas],
    }


def score(engine: Any, texts: Sequence[list[int]], answers: Sequence[list[int]]) -> list[list[tuple[float, float]]]:
    """For each position of each answer: log-probability of its token, and of the most likely one."""
    engine.flush_cache()  # what an earlier run computed is not what is asked

    async def one(prompt: list[int], tokens: list[int]) -> list[tuple[float, float]]:
        out = await engine.async_generate(
            input_ids=prompt + tokens, sampling_params={"temperature": 0, "max_new_tokens": 1}, return_logprob=True,
            logprob_start_len=len(prompt) - 1, top_logprobs_num=1,
        )  # fmt: skip
        chosen, top = out["meta_info"]["input_token_logprobs"], out["meta_info"]["input_top_logprobs"]
        # The first entry is of the prompt's last token, which has none.
        if [entry[1] for entry in chosen[1:]] != list(tokens):
            raise RuntimeError(f"scored {[entry[1] for entry in chosen[1:9]]}..., not the answer {tokens[:8]}...")
        return [(round(float(c[0]), 5), round(float(t[0][0]), 5)) for c, t in zip(chosen[1:], top[1:], strict=True)]

    async def every() -> list[list[tuple[float, float]]]:
        return await asyncio.gather(*(one(list(p), list(a)) for p, a in zip(texts, answers, strict=True)))

    scored: list[list[tuple[float, float]]] = engine.loop.run_until_complete(every())
    return scored


def scores(engine: Any, load: Load, answers: dict[str, Any]) -> dict[str, Any]:
    """Every run's answers scored; the last run's also after prompts with one page of other tokens."""
    texts, last = load.prompts(), list(answers.values())[-1]
    found = {name: score(engine, texts, mine) for name, mine in answers.items()}
    damaged = {"requests": list(range(len(texts))), "scores": score(engine, load.damaged(), last)}
    return {"scores": found, "controls": {DAMAGED: damaged}}


# ---- in the parent ---------------------------------------------------------------------------------------------------


def figures(
    answers: Sequence[Sequence[int]],
    logprobs: Sequence[Sequence[float]],
    scores: Sequence[Sequence[Sequence[float]]],
    reference: Sequence[Sequence[int]],
) -> dict[str, float]:
    """What one run comes to. Drift leaves out requests that came back with fewer log-probabilities than tokens, as
    some do that stock 0.5.17 has retracted; how many is told."""
    gaps = np.array([top - own for request in scores for own, top in request])
    whole = [(then, now) for then, now in zip(logprobs, scores, strict=True) if len(then) == len(now)]
    drift = np.array([abs(a - b[0]) for then, now in whole for a, b in zip(then, now, strict=True)])
    same = [
        next((i for i, (a, b) in enumerate(zip(mine, theirs, strict=True)) if a != b), -1)
        for mine, theirs in zip(answers, reference, strict=True)
    ]
    changed = [first for first in same if first >= 0]
    out: dict[str, float] = {
        "answers": len(answers),
        "changed": len(changed),
        "first_difference_p50": float(np.median(changed)) if changed else -1,
        "first_difference_min": min(changed, default=-1),
        "without_logprobs": len(logprobs) - len(whole),
    }
    for name, values in (("gap", gaps), ("drift", drift)):
        if not len(values):
            continue
        found = {"p50": np.percentile(values, 50), "p99": np.percentile(values, 99), "max": values.max()}
        out |= {f"{name}_{key}": round(float(value), 4) for key, value in found.items()}
    return out


def limits(floor: dict[str, float]) -> dict[str, float]:
    """What a run may reach that is as right as stock in the same pool."""
    return {name: round(FACTOR * floor[name] + SLACK, 4) for name in JUDGED if name in floor}


def beyond(found: dict[str, float], allowed: dict[str, float]) -> list[str]:
    """The figures that say that a run read something else than what was written; none: it passes."""
    return [
        f"{name} {found[name]} > {allowed[name]}" for name in JUDGED if found.get(name, 0) > allowed.get(name, math.inf)
    ]


def judge(raw: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """What the answers of each run came to, and whether it passes; raw: answers, scores and counts by run. Nothing
    without scores, or without stock in the small pool. A control has scores of some requests of the reference."""
    last = next((mine for mine in raw.values() if "scores" in mine), None)
    if FLOOR not in raw or last is None:
        return []
    reference, scores, out = last["answers"], last["scores"], []
    floor = figures(raw[FLOOR]["answers"], raw[FLOOR]["logprobs"], scores[FLOOR], reference)
    for name in (name for name in raw if name in scores):
        mine = raw[name]
        found = figures(mine["answers"], mine["logprobs"], scores[name], reference)
        why = beyond(found, limits(floor))
        if name.startswith("tidekv") and not mine["counts"].get("gb_from_host"):
            why.append("nothing came back from the host, so that nothing was compared")
        out.append({"run": name, "phase": "judged", **found, "passes": not why, "why": "; ".join(why)})
    for name, control in last["controls"].items():
        answers, logprobs = ([last[key][i] for i in control["requests"]] for key in ("answers", "logprobs"))
        found = figures(answers, logprobs, control["scores"], answers)
        why = beyond(found, limits(floor))
        out.append({"run": name, "phase": "judged", **found, "passes": not why, "why": "; ".join(why)})
    return out


def verdict(judged: list[dict[str, Any]]) -> list[str]:
    """What is wrong: a run of tidekv that does not pass, or a fault on purpose that does."""
    served = [r for r in judged if r["run"] != FAULT and r["run"].startswith("tidekv")]
    faulty = [r for r in judged if r["run"] == FAULT or not r["run"].startswith(("tidekv", "stock"))]
    out = [f"{r['run']}: {r['why']}" for r in served if not r["passes"]]
    return out + [f"{r['run']} passes: this comparison cannot fail" for r in faulty if r["passes"]]
