"""Two engines with the same weights and the same requests: one with ample memory, one that is made to narrow and
widen."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from tidekv import Engine, EngineConfig
from tidekv.engine import runner as runner_module
from tidekv.engine.model import LoadedModel, load_model, random_config
from tidekv.engine.request import Request
from tidekv.engine.sampling import SamplingParams
from tidekv.engine.scheduler import Scheduler
from tidekv.kernels import copy_engine, move
from tidekv.memory.ledger import DYNAMIC
from tidekv.memory.upload import upload
from tidekv.streaming import streamer

LAYERS = 8  # widths 8, 4, 2
CYCLES_A_MS = 1.98e6  # of `torch.cuda._sleep`, at a H200's clock


def load(device: str, shape: str, dtype: torch.dtype) -> LoadedModel:
    """`shape` "llama": Llama-3.1-8B's layers, eight of them and a small vocabulary. "tiny": for fp32 and for the
    CPU."""
    config = random_config("llama-3.1-8b")
    config.num_hidden_layers, config.vocab_size = LAYERS, 4096
    config.bos_token_id = config.eos_token_id = None
    if shape == "tiny":
        config.hidden_size, config.intermediate_size, config.num_attention_heads = 64, 128, 4
        config.num_key_value_heads, config.head_dim, config.initializer_range, config.vocab_size = 2, 16, 0.2, 128
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        return load_model(f"random:{folder}", device, dtype)


class Recorder:
    """Logits of each forward of each engine, in order, through the runner's own call."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.logits: list[torch.Tensor] = []
        original = runner_module.forward_packed

        def recording(*args: Any, **kwargs: Any) -> torch.Tensor:
            logits = original(*args, **kwargs)
            self.logits.append(logits.detach().clone())
            return logits

        monkeypatch.setattr(runner_module, "forward_packed", recording)

    def take(self) -> list[torch.Tensor]:
        taken, self.logits = self.logits, []
        return taken


class StepEverybody(Scheduler):
    """Nobody is paused and nothing widens by itself: both engines pack the same batch in every step."""

    def _steppable(self, requests: list[Request]) -> list[Request]:
        return requests

    def end_step(self) -> None:
        """Widths change when the test says so."""


def make(loaded: LoadedModel, device: str, dtype: torch.dtype, *, graphs: bool = False, **options: Any) -> Engine:
    """Nothing narrows or widens by itself; steps run launch by launch unless `graphs` (a replay pads the batch)."""
    settings: dict[str, Any] = {
        "num_pages": 600,
        "host_memory": "64MiB" if device == "cpu" else "512MiB",
        "page_size": 16,
        "prefill_chunk": 2048,
        "max_running": 8,
        "max_context_len": 2048,
        "prefix_cache": False,
        "dynamic_max_pages": 300,
        "overlap": False,  # a test reads the tokens of the step that it has just made
    }
    engine = Engine(EngineConfig(device=device, dtype=dtype, **(settings | options)), loaded)
    config = engine.config
    engine.scheduler = StepEverybody(engine.memory, "narrow", config.prefill_chunk, config.max_running)
    engine.allocator.may_halve = True
    if not graphs:
        engine.runner.graphs = None  # type: ignore[attr-defined]
    return engine


def widen(engine: Engine) -> int:
    """Every narrowed slot back to full width, now."""
    total = 0
    while widened := engine.allocator.restore_widths(1000, start_free=0.0, stop_free=0.0):
        total += widened
    return total


def start(engine: Engine, lengths: list[int], new_tokens: int, high: tuple[int, ...] = ()) -> list[str]:
    """Requests of these prompt lengths; the same tokens for every engine."""
    vocab = int(engine.model.config.vocab_size)
    rng = np.random.default_rng(5)
    sampling = SamplingParams(max_new_tokens=new_tokens, ignore_eos=True)
    return [
        engine.add_request(rng.integers(0, vocab, n).tolist(), sampling, is_high_priority=i in high)
        for i, n in enumerate(lengths)
    ]


def run(engine: Engine, steps: int, before: dict[int, Callable[[], Any]] | None = None) -> None:
    """`steps` steps; `before[i]` is called before step i. The books are recounted after each."""
    for i in range(steps):
        if before and i in before:
            before[i]()
        engine.step()
        engine.check()


def live_kv(engine: Engine, names: list[str]) -> list[torch.Tensor]:
    """K and V of every layer of every computed token of these requests, wherever they lie."""
    found = []
    for name in names:
        request = engine.requests[name]
        locs = engine.memory.pool.req_to_token[request.row, : request.num_computed]
        for layer in range(engine.geometry.layer_num):
            found += engine.allocator.read_kv(layer, locs)
    return found


def delay_and_poison(engine: Engine, device: str, longest_ms: float = 0.4) -> dict[str, int]:
    """Copies start late by a random time, and staging is NaN before each step and before each copy into it."""
    rng, counts = np.random.default_rng(9), {"copies": 0, "poisoned": 0}
    pool = engine.device_pool
    cells = [flat.view(engine.geometry.num_combined, -1) for flat in (pool.k_flat, pool.v_flat)]

    def before_copy(item: Any) -> None:  # nothing here waits for the device: the host must stay ahead
        counts["copies"] += 1
        if device == "cuda":
            torch.cuda._sleep(int(rng.uniform(0, longest_ms) * CYCLES_A_MS))
        if item.index == 0:
            pages = np.flatnonzero(engine.allocator.ledger.page_code == DYNAMIC)
            every = pages[None, :] + np.arange(engine.geometry.layer_num)[:, None] * engine.geometry.page_stride
            index = upload(pool.device, (every.ravel(),))[0]
            for flat in cells:
                flat.index_fill_(0, index, float("nan"))
            counts["poisoned"] += len(index)
        if engine.streamer._runs is not None:
            assert engine.streamer._schedule is not None
            mine = upload(pool.device, (engine.streamer._schedule.dst[item.begin : item.end],))[0]
        else:
            mine = engine.streamer._dst[item.begin : item.end]
        for flat in cells:
            flat.index_fill_(0, mine, float("nan"))

    backend = engine.backend
    engine.streamer.before_copy = before_copy
    write = backend._write_to_host

    def write_late(*args: torch.Tensor) -> None:
        if backend._compute is not None:
            with torch.cuda.stream(backend._host_writes):
                torch.cuda._sleep(int(rng.uniform(0, longest_ms) * CYCLES_A_MS))
        write(*args)

    backend._write_to_host = write_late  # type: ignore[method-assign]
    return counts


def copy_by(monkeypatch: pytest.MonkeyPatch, how: str, device: str) -> None:
    """Every streamed layer of a launched step comes in by the "kernel", or by the "copy engine"."""
    if how == "copy engine" and (missing := "needs a GPU" if device == "cpu" else copy_engine.why_not()):
        pytest.skip(f"the driver's batched copy: {missing}")
    monkeypatch.setattr(streamer, "COPY_ENGINE_TOKENS", 0 if how == "copy engine" else 1 << 60)
    monkeypatch.setattr(streamer, "COPY_ENGINE_RUN_BYTES", 0)


def poison_free(engine: Engine) -> int:
    """NaN in everything that nobody owns by now, device pages and host pages, queued behind the work so far: whoever
    still reads there, or writes there later, was not waited for. Returns the cells filled."""
    geometry, ledger, pool, host = engine.geometry, engine.allocator.ledger, engine.device_pool, engine.host_pool
    nothing = [torch.full_like(flat[: geometry.page_size], float("nan")) for flat in (pool.k_flat, pool.v_flat)]
    layers, filled = np.arange(geometry.layer_num)[:, None], 0
    for target, stride, free in (
        (pool, geometry.page_stride, ledger.free_list.all_pages()),
        (host, ledger.num_host_pages, ledger.host_free),
    ):
        cells = (layers * stride + free[None, :]).ravel()
        if len(cells):
            there, zero = upload(pool.device, (cells, np.zeros_like(cells)))
            move.copy_cells(target.k_flat, target.v_flat, *nothing, there, zero, geometry.page_size)
            filled += len(cells)
    return filled
