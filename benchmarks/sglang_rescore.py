"""The answers of group `answers` scored without an engine: the same model in plain torch, on any machine.

    python3 -m benchmarks.sglang_rescore --out FOLDER [--model MODEL] [--requests 0 8 16]

For a run whose reference did not get to scoring, and as a second opinion beside it: nothing of SGLang or tidekv takes
part. Reads FOLDER/answers.json.gz, writes what the reference would have written there (`--judge` of
benchmarks.sglang_pressure then judges), and two things more, for every eighth request:

    the reference's answers after a prompt with one page of other tokens
    the same after its own prompt, of which one page reads its neighbour's K and V in one layer

Products in the weights' dtype (bf16), all else in fp32. Without --model the weights are made as sglang_answers makes
them. Three runs and both controls take 20 s a request on two cores.
"""

from __future__ import annotations

import argparse
import gzip
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from benchmarks import sglang_answers
from benchmarks.sglang_answers import DAMAGED, FLOOR, PAGE, REFERENCE

WRONG_LAYER = 3
ONE_PAGE = "scored with one page that reads its neighbour's KV in one layer"
KV = list[tuple[torch.Tensor, torch.Tensor]]  # of each layer: [tokens, kv heads, head_dim]


class PlainLlama:
    """A Llama from a folder with config.json and model.safetensors."""

    def __init__(self, folder: Path) -> None:
        from safetensors.torch import load_file

        config = json.loads((folder / "config.json").read_text())
        self.layers, self.dim = config["num_hidden_layers"], config["head_dim"]
        self.heads, self.kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        self.eps = config["rms_norm_eps"]
        self.inverse = 1 / config["rope_theta"] ** (torch.arange(0, self.dim, 2).float() / self.dim)
        self.weights = load_file(folder / "model.safetensors")

    def hidden(self, ids: Sequence[int], past: KV | None = None) -> tuple[torch.Tensor, KV]:
        """[T] token ids behind `past` -> (hidden states [T, H], K and V of everything so far)."""
        begin, n = (0 if past is None else len(past[0][0])), len(ids)
        x, kv = self.weights["model.embed_tokens.weight"][torch.tensor(ids)].float(), []
        mask = torch.ones(n, begin + n, dtype=torch.bool).tril(begin)
        for layer in range(self.layers):
            name = f"model.layers.{layer}."
            h = self._norm(x, name + "input_layernorm")
            q, k, v = (self._linear(h, f"{name}self_attn.{part}_proj").view(n, -1, self.dim) for part in "qkv")
            q, k = self._rotate(q, begin), self._rotate(k, begin)
            if past is not None:
                k, v = torch.cat([past[layer][0], k]), torch.cat([past[layer][1], v])
            kv.append((k, v))
            rows = [t.transpose(0, 1)[None] for t in (q, k, v)]
            seen = functional.scaled_dot_product_attention(*rows, attn_mask=mask, enable_gqa=True)
            x = x + self._linear(seen[0].transpose(0, 1).reshape(n, -1), name + "self_attn.o_proj")
            h = self._norm(x, name + "post_attention_layernorm")
            gate, up = self._linear(h, name + "mlp.gate_proj"), self._linear(h, name + "mlp.up_proj")
            x = x + self._linear(functional.silu(gate) * up, name + "mlp.down_proj")
        return x, kv

    def score(self, last: torch.Tensor, past: KV, answer: Sequence[int]) -> list[tuple[float, float]]:
        """For each position: log-probability of its token, and of the most likely one. last: [1, H] of the prompt."""
        x, _ = self.hidden(answer[:-1], past)
        found = torch.log_softmax(self._linear(self._norm(torch.cat([last, x]), "model.norm"), "lm_head"), -1)
        own, top = found.gather(1, torch.tensor(answer)[:, None])[:, 0], found.amax(-1)
        return [(round(float(a), 5), round(float(b), 5)) for a, b in zip(own, top, strict=True)]

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weights[f"{name}.weight"].float()

    def _linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        weight = self.weights[f"{name}.weight"]
        return functional.linear(x.to(weight.dtype), weight).float()

    def _rotate(self, x: torch.Tensor, begin: int) -> torch.Tensor:
        angle = torch.arange(begin, begin + len(x)).float()[:, None] * self.inverse
        cos, sin = (torch.cat([part, part], 1)[:, None] for part in (angle.cos(), angle.sin()))
        return x * cos + torch.cat([-x[..., self.dim // 2 :], x[..., : self.dim // 2]], -1) * sin


def with_a_wrong_page(kv: KV, layer: int, begin: int, size: int) -> KV:
    """Tokens [begin, begin + size) of this layer have the K and V of those behind them."""
    wrong = list(kv)
    k, v = (t.clone() for t in kv[layer])
    for t in (k, v):
        t[begin : begin + size] = t[begin + size : begin + 2 * size]
    wrong[layer] = k, v
    return wrong


def rescore(model: PlainLlama, raw: dict[str, Any], load: sglang_answers.Load, chosen: Sequence[int]) -> dict[str, Any]:
    """`raw` with these requests alone, and the scores of every run's."""
    reference = REFERENCE if REFERENCE in raw else FLOOR
    prompts, damaged = load.prompts(), load.damaged()
    scores: dict[str, list[Any]] = {name: [] for name in raw}
    controls: dict[str, Any] = {name: {"requests": [], "scores": []} for name in (DAMAGED, ONE_PAGE)}
    with torch.inference_mode():
        for place, index in enumerate(chosen):
            x, kv = model.hidden(prompts[index])
            for name, mine in raw.items():
                scores[name].append(model.score(x[-1:], kv, mine["answers"][index]))
            if index % 8 == 0:
                answer, size = raw[reference]["answers"][index], min(PAGE, load.prompt // 4)
                wrong = with_a_wrong_page(kv, WRONG_LAYER, load.prompt // 2, size)
                for name, (state, cache) in {DAMAGED: model.hidden(damaged[index]), ONE_PAGE: (x, wrong)}.items():
                    controls[name]["requests"].append(place)
                    controls[name]["scores"].append(model.score(state[-1:], cache, answer))
            print(f"request {index} scored", flush=True)
    out = {
        name: mine | {key: [mine[key][i] for i in chosen] for key in ("answers", "logprobs")}
        for name, mine in raw.items()
    }
    out[reference] |= {"scores": scores, "controls": controls}
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="the folder of the run; its answers are rewritten")
    parser.add_argument("--model", type=Path, help="the folder of its model; default: made again")
    parser.add_argument("--requests", type=int, nargs="+", help="default: all")
    parser.add_argument("--smoke", action="store_true", help="the run was one with --smoke")
    args = parser.parse_args()
    file = args.out / sglang_answers.ANSWERS
    with gzip.open(file, "rt") as text:
        raw = json.load(text)
    load = sglang_answers.SMOKE if args.smoke else sglang_answers.FULL
    with tempfile.TemporaryDirectory() as folder:
        if args.model is None:
            sglang_answers.write_model(Path(folder), args.smoke)
        model = PlainLlama(args.model or Path(folder))
        raw = rescore(model, raw, load, args.requests or range(load.num_requests))
    with gzip.open(file, "wt") as text:
        json.dump(raw, text)


if __name__ == "__main__":
    main()
