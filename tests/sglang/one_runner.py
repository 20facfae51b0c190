"""One model runner of SGLang in this process, without a server: a tiny random model, real batches, pages narrowed by
hand.

    SGLANG_USE_CPU_ENGINE=1 TIDEKV_SGLANG=1 python tests/sglang/one_runner.py FOLDER OUT      writes one JSON object
    ... --backend triton      with TRITON_INTERPRET=1: SGLang's Triton backend over pages that have moved
    ... --backend flashinfer, or fa3      the same, these backends' own kernels in torch (`torch_kernels.py`)
    TIDEKV_SGLANG=1 python tests/sglang/one_runner.py FOLDER OUT --cuda --backend triton      the first with real graphs

The repository's root must be on PYTHONPATH, for `benchmarks/sglang_runner.py`.

Each run decodes the same requests step by step and keeps the logits; runs differ in what narrows, and how it is read.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch_kernels
from benchmarks.sglang_runner import BACKENDS, make_request, make_runner, row_of, set_range

PAGE_SIZE, LAYERS, STEPS = 4, 8, 24
PROMPTS = (30, 9, 17, 22)
POOL_TOKENS = 1024
CUT = 14  # tokens of a first chunk: 3 pages and a half


def write_model(folder: Path, cuda: bool) -> None:
    """A Llama of 8 layers whose weights are large enough that every key matters. For CUDA it has the widths of an 8B
    model (0.7 GB), for which SGLang's kernels are compiled more often than for any other."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    shape = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 2, "num_key_value_heads": 1}
    if cuda:
        shape = {"hidden_size": 4096, "intermediate_size": 256, "num_attention_heads": 32, "num_key_value_heads": 8}
    config = LlamaConfig(
        vocab_size=128, num_hidden_layers=LAYERS, head_dim=128 if cuda else 64, max_position_embeddings=512,
        initializer_range=2 / shape["hidden_size"] ** 0.5, tie_word_embeddings=False, **shape,
    )  # fmt: skip
    LlamaForCausalLM(config).to(torch.bfloat16 if cuda else torch.float32).save_pretrained(folder)
    text = json.loads((folder / "config.json").read_text())
    text["rope_theta"] = 10000.0  # where loaders before transformers 5 look
    (folder / "config.json").write_text(json.dumps(text))


def runner_of(folder: Path, **options: Any) -> Any:
    """A model runner over the tiny model. options: arguments of the server in place of these, which are for a CPU."""
    if not (folder / "config.json").is_file():
        write_model(folder, options.get("device") == "cuda")
    common: dict[str, Any] = {
        "device": "cpu", "attention_backend": "torch_native", "dtype": "float32", "page_size": PAGE_SIZE,
        "max_total_tokens": POOL_TOKENS, "max_running_requests": 8, "context_length": 256,
    }  # fmt: skip
    return make_runner(str(folder), **common | options)


class Run:
    """One batch from its prefill to its last decode step."""

    def __init__(
        self, runner: Any, forced: Run | None = None, cut: int = 0, between: Callable[[Run], None] = lambda made: None
    ) -> None:
        """forced: every step continues with the tokens that this run chose, so that one other token does not make all
        that follow differ. cut: prompts are prefilled in two steps, as chunks, the first of so many tokens;
        `between(run)` is called before the second."""
        from sglang.benchmark import one_batch

        self.runner, self.tide, self.forced = runner, runner.token_to_kv_pool_allocator, forced
        self.one_batch = one_batch
        runner.req_to_token_pool.clear()
        self.tide.clear()
        pool = runner.token_to_kv_pool.device_pool  # what an earlier run left is right for this one, too
        pool.k_flat.fill_(3.0)
        pool.v_flat.fill_(3.0)
        rng = np.random.default_rng(1)
        self.reqs = [
            make_request(index, rng.integers(0, 128, length).tolist(), STEPS, 5 if index == 1 else 0)
            for index, length in enumerate(PROMPTS)
        ]
        self.logits: list[torch.Tensor] = []
        self.chosen: list[list[int]] = []
        self.streamed = -streamed_bytes(runner)
        if cut:
            for req in self.reqs:
                set_range(req, 0, min(cut, len(req.origin_input_ids) - 1))
            one_batch.extend(self.reqs, runner)
            self.tide.end_step()
            between(self)
            for req in self.reqs:
                begin, end = min(cut, len(req.origin_input_ids) - 1), len(req.origin_input_ids)
                set_range(req, begin, end, runner.req_to_token_pool.req_to_token)
        self.tokens, logits, self.batch = one_batch.extend(self.reqs, runner)
        self.logits.append(logits.clone())
        self.chosen.append(self.tokens.tolist())
        self.tide.end_step()

    def pages(self, index: int, begin: int, end: int) -> np.ndarray:
        """Slots of pages [begin, end) of a request, as far as it has them."""
        num_tokens = PROMPTS[index] + max(0, len(self.logits) - 1)
        ids = self.tide.mirror.ids_of([self.reqs[index]], np.array([min(-(-num_tokens // PAGE_SIZE), end)]))[0, begin:]
        return np.asarray(self.tide.pages.slots_of(ids))

    def step(self) -> None:
        from tidekv.sglang_plugin.page_mirror import read_rows

        if self.forced is not None:
            self.tokens = torch.tensor(self.forced.chosen[len(self.chosen) - 1], device=self.tokens.device)
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


def run(runner: Any, before: Callable[[Run, int], None], steps: int = STEPS, forced: Run | None = None) -> Run:
    """Prefill and all steps; `before(run, step)` narrows or widens."""
    made = Run(runner, forced)
    for step in range(steps):
        before(made, step)
        made.step()
    made.streamed += streamed_bytes(runner)
    return made


def streamed_bytes(runner: Any) -> int:
    """Bytes that came from the host for steps, in all runs."""
    return int(runner.attn_backend.tide_core.streamer.bytes_in)


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


def narrowing_one(made: Run, step: int) -> None:
    """No more than staging holds at once: nothing is read in parts, so nothing sums in another order."""
    if step == 3:
        made.tide.core.narrow_slots(made.pages(0, 1, 6), made.tide.core.ledger.ladder[1])
    if step == 14:
        made.tide.core.widen_slots(made.pages(0, 1, 6))


def moving(made: Run, step: int) -> None:
    """Everything is full width, and lies elsewhere."""
    if step == 5:
        move(made)


def move(made: Run, num_pages: int = 64) -> None:
    """Narrowed and widened at once: the first pages of the first request, that which it writes next included."""
    made.tide.core.narrow_slots(made.pages(0, 0, num_pages), made.tide.core.ledger.ladder[1])
    made.tide.core.widen_slots(made.pages(0, 0, num_pages))


def in_core(narrows: Callable[[Run, int], None]) -> Callable[[Run, int], None]:
    """For an attention that lists no rows: a page of the first request moves at once, so that the core reads every
    step of the batch."""

    def before(made: Run, step: int) -> None:
        if step == 0:
            move(made, 1)
        narrows(made, step)

    return before


def two_prefills(runner: Any, between: Callable[[Run], None]) -> Run:
    """Prompts in two chunks: the second one's prefix is read from the pool."""
    made = Run(runner, None, CUT, between)
    made.step()
    made.streamed += streamed_bytes(runner)
    return made


def old_pages_narrow(made: Run, step: int) -> None:
    """What a window does not reach of two low requests gives up layers."""
    if step == 4:
        slots = np.concatenate([made.pages(0, 1, 5), made.pages(3, 1, 4)])
        made.tide.core.narrow_slots(slots, made.tide.core.ledger.ladder[2])


def main(folder: Path, cuda: bool, backend: str, report: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Every run; what the tests look at. `report` is called after each with all there is."""
    from sglang.version import __version__

    from tidekv.sglang_plugin.graphs import NarrowGraphs
    from tidekv.sglang_plugin.window import Window

    begin = time.monotonic()
    on_cuda: dict[str, Any] = {"device": "cuda", "attention_backend": backend, "sampling_backend": "pytorch"}
    # SGLang's kernels for CUDA have no fp32: what other kernels compute there differs by bf16's rounding, what the same
    # kernels compute (moved pages) does not differ at all.
    on_cuda |= {"dtype": "bfloat16", "disable_prefill_cuda_graph": True, "cuda_graph_bs_decode": [1, 8]}
    runner = runner_of(folder, **(on_cuda if cuda else {}))
    attention, allocator = runner.attn_backend, runner.token_to_kv_pool_allocator
    out: dict[str, Any] = {
        "sglang": __version__,
        "backend": type(attention).__name__,
        "core_kernels": attention.tide_core.name,
    }

    def compare(name: str, made: Run, reference: Run) -> None:
        pairs = [(a.float().cpu(), b.float().cpu()) for a, b in zip(made.logits, reference.logits, strict=True)]
        off = [float((a - b).abs().max()) for a, b in pairs]
        graphs = attention.narrow_graphs
        out[name] = {
            "largest_difference": max(off),
            "typical_difference": float(np.mean([(a - b).abs().mean() for a, b in pairs])),
            "same_tokens": made.chosen == reference.chosen,
            "moved_steps": attention.num_moved,
            "replays": graphs.steps.narrow_replays if graphs else 0,
            "displaced": int(made.tide.pages.displaced),
            "read_back": int(made.tide.mirror.num_read_back),
            "streamed": made.streamed,
        }
        report(out)
        print(f"{time.monotonic() - begin:.1f} s", name, out[name], file=sys.stderr, flush=True)

    plain: Run | None = None  # its tokens are all others'

    def captured(narrows: Callable[[Run, int], None]) -> Run:
        attention.captures_narrow = True
        attention.narrow_graphs = NarrowGraphs(runner, attention, capture=cuda)
        return run(runner, narrows, forced=plain)

    def launched(narrows: Callable[[Run, int], None]) -> Run:
        attention.captures_narrow, attention.narrow_graphs = False, None
        return run(runner, narrows, forced=plain)

    def nothing(made: Run, step: int) -> None:
        pass

    plain = launched(nothing)
    out["spread"] = float(max(logits.std() for logits in plain.logits))
    compare("moved", launched(moving), plain)
    graphs, runner.decode_cuda_graph_runner = runner.decode_cuda_graph_runner, None
    eager_plain = launched(nothing)
    compare("moved_launched", launched(moving), eager_plain)
    runner.decode_cuda_graph_runner = graphs
    whole = two_prefills(runner, lambda made: None)
    compare("moved_prefix", two_prefills(runner, lambda made: move(made, -(-CUT // PAGE_SIZE))), whole)
    # What is narrowed is compared with SGLang's own kernels, and with the core's at full width: the former differ by
    # how they sum, the latter by nothing but where K and V come from.
    lists_rows = attention.lists_rows
    attention.lists_rows = False
    core = launched(in_core(nothing))
    compare("core", core, plain)
    compare("narrow_in_core", launched(in_core(narrowing_one)), core)
    attention.lists_rows = lists_rows
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


def main_lists(folder: Path, backend: str) -> dict[str, Any]:
    """Moved pages under one of SGLang's backends for CUDA, on a CPU: read by launched steps, listed as for a replay.

    SGLang's Triton kernels run in Triton's interpreter; those of FlashInfer and FlashAttention are `torch_kernels`.
    """
    import sglang.version

    if backend != "triton":
        torch_kernels.stand_in(backend)
    runner = runner_of(folder, attention_backend=backend)
    plain = run(runner, lambda made, step: None, 3)
    prefix = two_prefills(runner, lambda made: None)
    moved_prefix = two_prefills(runner, lambda made: move(made, -(-CUT // PAGE_SIZE)))
    prefix_displaced = int(moved_prefix.tide.pages.displaced)
    moved = run(runner, lambda made, step: move(made) if step == 1 else None, 3)
    displaced = int(moved.tide.pages.displaced)
    move(moved)

    def off(made: Run, reference: Run) -> float:
        return max(float((a - b).abs().max()) for a, b in zip(made.logits, reference.logits, strict=True))

    return {
        "sglang": sglang.version.__version__,
        "backend": type(runner.attn_backend).__mro__[1].__name__,
        "largest_difference": off(moved, plain),
        "displaced": displaced,
        "prefix_difference": off(moved_prefix, prefix),
        "prefix_displaced": prefix_displaced,
        "spread": float(plain.logits[0].std()),
    } | listed_rows(runner, moved, backend)


def listed_rows(runner: Any, made: Run, backend: str) -> dict[str, Any]:
    """The rows that the next step reads if it is launched, if it is replayed, and those of a graph's padding; where its
    pages really lie; whether SGLang's batch has its own locations again."""
    from types import SimpleNamespace

    from sglang.srt.model_executor.forward_batch_info import ForwardBatch

    made.batch.input_ids = made.tokens.to(torch.int64)
    made.batch.prepare_for_decode()
    batch = ForwardBatch.init_new(made.batch, runner, return_hidden_states_before_norm=False)
    attention, locs = runner.attn_backend, batch.out_cache_loc
    count, padding = len(PROMPTS), 2
    attention.init_cuda_graph_state(8, 8)
    lens = torch.cat([batch.seq_lens, torch.ones(padding, dtype=batch.seq_lens.dtype)])
    view = SimpleNamespace(
        batch_size=count + padding, forward_mode=batch.forward_mode, spec_info=None, encoder_lens=None,
        req_pool_indices=torch.cat([batch.req_pool_indices, batch.req_pool_indices.new_zeros(padding)]),
        seq_lens=lens, seq_lens_cpu=lens, seq_lens_sum=int(lens.sum()), out_cache_loc=batch.out_cache_loc,
        positions=lens - 1, kv_loc_plan=getattr(batch, "kv_loc_plan", None),
    )  # fmt: skip
    if backend != "triton":  # these make what a graph reads when it is captured
        attention.init_forward_metadata_out_graph(view, in_capture=True)
    with attention.planned(batch):
        attention.init_forward_metadata(batch)
        launched = read_by(attention, backend, count, lens[:count], captured=False)
        view.out_cache_loc = batch.out_cache_loc
        attention.init_forward_metadata_out_graph(view)
        replayed = read_by(attention, backend, count + padding, lens, captured=True)
        new = batch.out_cache_loc.tolist()
    lie = []
    for index, length in enumerate(lens[:count].tolist()):
        ids = made.tide.mirror.ids_of([made.reqs[index]], np.array([-(-length // PAGE_SIZE)]))[0]
        first = made.tide.pages.first_locs(ids)
        lie += [int(first[t // PAGE_SIZE]) + t % PAGE_SIZE for t in range(length)]
    return {
        "launched": launched,
        "replayed": replayed[:-padding],
        "padded": replayed[-padding:],
        "lie": lie,
        "written": new,
        "last": [lie[end - 1] for end in torch.cumsum(lens[:count], 0).tolist()],
        "own_locs_are_back": batch.out_cache_loc is locs,
    }


def read_by(attention: Any, backend: str, count: int, lens: torch.Tensor, *, captured: bool) -> list[int]:
    """Rows that SGLang's kernels would read, request after request, from the tensor that they are given."""
    total = int(lens.sum())
    if backend == "triton":
        rows = attention.cuda_graph_kv_indices if captured else attention.forward_metadata.kv_indices
        return list(rows[:total].tolist())
    if backend == "flashinfer":
        metadata = (
            attention.decode_cuda_graph_metadata[count] if captured else attention.forward_metadata.decode_wrappers
        )
        return list(metadata[0]._paged_kv_indices_buf[:total].tolist())
    table = (attention.decode_cuda_graph_metadata[count] if captured else attention.forward_metadata).page_table
    return [
        int(table[b, t // PAGE_SIZE]) * PAGE_SIZE + t % PAGE_SIZE for b in range(count) for t in range(int(lens[b]))
    ]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="of the tiny model, made if it is not there")
    parser.add_argument("out", type=Path, help="JSON file to write")
    parser.add_argument("--cuda", action="store_true")
    parser.add_argument("--backend", choices=BACKENDS)
    args = parser.parse_args()

    def write(found: dict[str, Any]) -> None:
        args.out.write_text(json.dumps(found, indent=1))

    if args.backend is not None and not args.cuda:
        write(main_lists(args.folder, args.backend))
    else:
        write(main(args.folder, args.cuda, args.backend or "triton", write))
