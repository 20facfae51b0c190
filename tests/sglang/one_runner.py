"""One model runner of SGLang in this process, without a server: a tiny random model, real batches, pages narrowed by
hand.

    SGLANG_USE_CPU_ENGINE=1 TIDEKV_SGLANG=1 python tests/sglang/one_runner.py FOLDER OUT      writes one JSON object
    ... --triton      with TRITON_INTERPRET=1: SGLang's Triton backend over pages that have moved
    TIDEKV_SGLANG=1 python tests/sglang/one_runner.py FOLDER OUT --cuda      the first with real graphs

Each run decodes the same requests step by step and keeps the logits; runs differ in what narrows, and how it is read.
"""

from __future__ import annotations

import json
import sys
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

PAGE_SIZE, LAYERS, STEPS = 4, 8, 24
PROMPTS = (30, 9, 17, 22)
POOL_TOKENS = 1024


def write_model(folder: Path) -> None:
    """A Llama of 8 layers whose weights are large enough that every key matters."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128, hidden_size=64, intermediate_size=96, num_hidden_layers=LAYERS, num_attention_heads=2,
        num_key_value_heads=1, head_dim=64, max_position_embeddings=512, initializer_range=0.25,
        tie_word_embeddings=False,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    text = json.loads((folder / "config.json").read_text())
    text["rope_theta"] = 10000.0  # where loaders before transformers 5 look
    (folder / "config.json").write_text(json.dumps(text))


def make_runner(folder: Path, **options: Any) -> Any:
    """SGLang's model runner with the plugin's hooks, as `sglang.benchmark.one_batch` makes it. options: arguments of
    the server in place of these, which are for a CPU."""
    from sglang.benchmark import one_batch
    from sglang.srt.server_args import PortArgs, ServerArgs

    from tidekv.sglang_plugin import plugin
    from tidekv.sglang_plugin.config import read_settings

    if not (folder / "config.json").is_file():
        write_model(folder)
    plugin.install(read_settings())
    common: dict[str, Any] = {
        "device": "cpu", "attention_backend": "torch_native", "dtype": "float32", "page_size": PAGE_SIZE,
        "max_total_tokens": POOL_TOKENS, "max_running_requests": 8, "context_length": 256, "log_level": "error",
    }  # fmt: skip
    args = ServerArgs(
        model_path=str(folder), disable_overlap_schedule=True, enable_priority_scheduling=True,
        default_priority_value=0, skip_tokenizer_init=True, **common | options,
    )  # fmt: skip
    if hasattr(args, "resolve_once"):  # 0.5.20: arguments are resolved and published by whoever starts a process
        from sglang.srt.runtime_context import publish

        args.resolve_once()
        publish(args, role="scheduler")
    one_batch.get_tokenizer = lambda *a, **k: None
    wrapped, _ = one_batch.load_model(args, PortArgs.init_new(args), 0, 0)
    return wrapped.torch_runner


class Run:
    """One batch from its prefill to its last decode step."""

    def __init__(self, runner: Any) -> None:
        from sglang.benchmark import one_batch
        from sglang.srt.managers.schedule_batch import Req
        from sglang.srt.sampling.sampling_params import SamplingParams

        self.runner, self.tide = runner, runner.token_to_kv_pool_allocator
        self.one_batch = one_batch
        runner.req_to_token_pool.clear()
        self.tide.clear()
        rng = np.random.default_rng(1)
        self.reqs = []
        for index, length in enumerate(PROMPTS):
            ids = array("q", rng.integers(0, 128, length).tolist())
            req = Req(str(index), "", ids, SamplingParams(temperature=0, max_new_tokens=STEPS))
            req.priority = 5 if index == 1 else 0
            req.full_untruncated_fill_ids = req.origin_input_ids
            req.logprob_start_len = -1
            req.set_extend_range(0, length)
            self.reqs.append(req)
        self.tokens, logits, self.batch = one_batch.extend(self.reqs, runner)
        self.logits = [logits.clone()]
        self.chosen = [self.tokens.tolist()]
        self.tide.end_step()

    def pages(self, index: int, begin: int, end: int) -> np.ndarray:
        """Slots of pages [begin, end) of a request."""
        num = np.array([-(-len(self.logits) // PAGE_SIZE) + PROMPTS[index] // PAGE_SIZE])
        ids = self.tide.mirror.ids_of([self.reqs[index]], np.minimum(num, end))[0, begin:]
        return np.asarray(self.tide.pages.slots_of(ids))

    def step(self) -> None:
        from tidekv.sglang_plugin.page_mirror import read_rows, row_of

        self.tokens, logits = self.one_batch.decode(self.tokens, self.batch, self.runner)
        self.logits.append(logits.clone())
        self.chosen.append(self.tokens.tolist())
        self.tide.end_step()
        num = -(-self.batch.seq_lens_cpu.numpy().astype(np.int64) // PAGE_SIZE)
        rows = torch.tensor([row_of(req) for req in self.reqs])
        read = read_rows(self.runner.req_to_token_pool.req_to_token, rows, num, PAGE_SIZE)
        assert np.array_equal(self.tide.mirror.ids_of(self.reqs, num), read), (
            f"the rows are {read.tolist()}, their copy {self.tide.mirror.ids_of(self.reqs, num).tolist()}"
        )
        self.tide.check()


def run(runner: Any, before: Callable[[Run, int], None], steps: int = STEPS) -> Run:
    """Prefill and all steps; `before(run, step)` narrows or widens."""
    made = Run(runner)
    for step in range(steps):
        before(made, step)
        made.step()
    return made


def narrowing(made: Run, step: int) -> None:
    """Pages of low requests give up layers, deeper ones later, and come back; some requests are never touched."""
    core, ladder = made.tide.core, made.tide.core.ledger.ladder
    if step == 3:
        core.narrow_slots(made.pages(0, 1, 6), ladder[1])
    if step == 8:
        core.narrow_slots(made.pages(2, 0, 4), ladder[2])
    if step == 14:
        core.widen_slots(made.pages(0, 1, 6))
    if step == 19:
        core.widen_slots(made.pages(2, 0, 4))


def moving(made: Run, step: int) -> None:
    """Narrowed and widened at once: everything is full width, and lies elsewhere."""
    if step == 5:
        slots = made.pages(0, 0, 5)
        made.tide.core.narrow_slots(slots, made.tide.core.ledger.ladder[1])
        made.tide.core.widen_slots(made.pages(0, 0, 5))


def old_pages_narrow(made: Run, step: int) -> None:
    """What a window does not reach of two low requests gives up layers."""
    if step == 4:
        slots = np.concatenate([made.pages(0, 1, 5), made.pages(3, 1, 4)])
        made.tide.core.narrow_slots(slots, made.tide.core.ledger.ladder[2])


def main(folder: Path, cuda: bool) -> dict[str, Any]:
    """Every run; what the tests look at."""
    from sglang.version import __version__

    from tidekv.sglang_plugin.graphs import NarrowGraphs
    from tidekv.sglang_plugin.window import Window

    on_cuda: dict[str, Any] = {"device": "cuda", "attention_backend": "triton", "sampling_backend": "pytorch"}
    # SGLang's kernels for CUDA have no fp32: what other kernels compute there differs by bf16's rounding, what the same
    # kernels compute (moved pages) does not differ at all.
    on_cuda |= {"dtype": "bfloat16", "disable_prefill_cuda_graph": True}
    runner = make_runner(folder, **(on_cuda if cuda else {}))
    attention, allocator = runner.attn_backend, runner.token_to_kv_pool_allocator
    out: dict[str, Any] = {"sglang": __version__}

    def compare(name: str, made: Run, reference: Run) -> None:
        off = [float((a - b).abs().max()) for a, b in zip(made.logits, reference.logits, strict=True)]
        graphs = attention.narrow_graphs
        out[name] = {
            "largest_difference": max(off),
            "same_tokens": made.chosen == reference.chosen,
            "replays": graphs.steps.narrow_replays if graphs else 0,
            "displaced": int(made.tide.pages.displaced),
            "read_back": int(made.tide.mirror.num_read_back),
            "streamed": int(attention.tide_core.streamer.bytes_in),
        }
        print(name, out[name], file=sys.stderr, flush=True)

    def captured(narrows: Callable[[Run, int], None]) -> Run:
        attention.captures_narrow = True
        attention.narrow_graphs = NarrowGraphs(runner, attention, capture=cuda)
        return run(runner, narrows)

    def launched(narrows: Callable[[Run, int], None]) -> Run:
        attention.captures_narrow, attention.narrow_graphs = False, None
        return run(runner, narrows)

    plain = launched(lambda made, step: None)
    out["spread"] = float(max(logits.std() for logits in plain.logits))
    compare("moved", launched(moving), plain)
    eager = launched(narrowing)
    compare("eager", eager, plain)
    replayed = captured(narrowing)
    compare("captured", replayed, plain)
    compare("captured_as_eager", replayed, eager)
    allocator.window = Window(8, PAGE_SIZE)
    window = launched(old_pages_narrow)
    compare("window_is_lossy", window, plain)
    compare("window", captured(old_pages_narrow), window)
    out["high_in_window"] = max(
        float((a[1] - b[1]).abs().max()) for a, b in zip(window.logits, plain.logits, strict=True)
    )
    return out


def main_triton(folder: Path) -> dict[str, Any]:
    """Moved pages under SGLang's Triton kernels, in Triton's interpreter: launched, and listed as for a replay."""
    runner = make_runner(folder, attention_backend="triton")
    plain = run(runner, lambda made, step: None, 3)
    moved = run(runner, lambda made, step: moving(made, 5) if step == 1 else None, 3)
    off = [float((a - b).abs().max()) for a, b in zip(moved.logits, plain.logits, strict=True)]
    launched, replayed, padded, own = listed_rows(runner, moved)
    return {
        "largest_difference": max(off),
        "displaced": int(moved.tide.pages.displaced),
        "launched": launched,
        "replayed": replayed,
        "padded": padded,
        "own_locs_are_back": own,
    }


def listed_rows(runner: Any, made: Run) -> tuple[list[int], list[int], list[int], bool]:
    """(rows that the next step reads if it is launched, if it is replayed, and those of padding; whether SGLang's
    batch has its own locations again)."""
    from types import SimpleNamespace

    from sglang.srt.model_executor.forward_batch_info import ForwardBatch

    made.batch.input_ids = made.tokens.to(torch.int64)
    made.batch.prepare_for_decode()
    batch = ForwardBatch.init_new(made.batch, runner, return_hidden_states_before_norm=False)
    attention, locs = runner.attn_backend, batch.out_cache_loc
    count, padding = len(PROMPTS), 2
    attention.init_cuda_graph_state(8, 8)
    with attention.planned(batch):
        attention.init_forward_metadata(batch)
        launched = attention.forward_metadata.kv_indices.tolist()
        lens = torch.cat([batch.seq_lens, torch.ones(padding, dtype=batch.seq_lens.dtype)])
        view = SimpleNamespace(
            batch_size=count + padding, forward_mode=batch.forward_mode, spec_info=None, encoder_lens=None,
            req_pool_indices=torch.cat([batch.req_pool_indices, batch.req_pool_indices.new_zeros(padding)]),
            seq_lens=lens, seq_lens_cpu=lens, seq_lens_sum=int(lens.sum()), out_cache_loc=batch.out_cache_loc,
        )  # fmt: skip
        attention.init_forward_metadata_out_graph(view)
        rows = attention.cuda_graph_kv_indices[: int(lens.sum())].tolist()
    return launched, rows[:-padding], rows[-padding:], batch.out_cache_loc is locs


def write(folder: Path, out: Path, *flags: str) -> None:
    """Run what the flags say."""
    found = main_triton(folder) if "--triton" in flags else main(folder, "--cuda" in flags)
    out.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    write(Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:])
