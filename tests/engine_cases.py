"""What the engine tests share: tiny models, random loads, a driver that checks the books at every step, and an oracle.

The oracle is a forward over the whole sequence without any cache: whatever the engine does with memory, the logits that
it samples from must be those. Tokens alone would hide an error that is too small to flip an argmax.
"""

from __future__ import annotations

import functools
import random
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from tidekv.demo import plain_logits
from tidekv.engine import runner as runner_module
from tidekv.engine.engine import Engine, EngineConfig
from tidekv.engine.model import LoadedModel, load_model
from tidekv.engine.request import Request
from tidekv.engine.sampling import SamplingParams
from tidekv.memory.ledger import DYNAMIC

VOCAB = 128
# Of the largest logit. Measured: at most 2e-6; a page that is counted twice, or a stale cell, gives 1e-3 and more.
LOGIT_TOLERANCE = 1e-5
LONGEST = {1: 12, 4: 36, 16: 90}  # prompt tokens at most, by page size


@functools.cache
def tiny_model(layer_num: int) -> LoadedModel:
    """Random weights, float32 on the CPU. 4 layers: "random:tiny"; others from a config folder."""
    if layer_num == 4:
        return load_model("random:tiny", "cpu", torch.float32)
    from transformers import AutoConfig

    with tempfile.TemporaryDirectory() as folder:
        AutoConfig.for_model(
            "llama",
            vocab_size=VOCAB,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=layer_num,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=16,
            max_position_embeddings=512,
            initializer_range=0.2,
            bos_token_id=None,
            eos_token_id=None,
        ).save_pretrained(folder)
        return load_model(f"random:{folder}", "cpu", torch.float32)


@dataclass(frozen=True)
class Ask:
    """One request of a load."""

    prompt: list[int]
    max_new_tokens: int
    is_high: bool = False

    def pages(self, page_size: int) -> int:
        """Pages at its end."""
        return -(-(len(self.prompt) + self.max_new_tokens - 1) // page_size)


def tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(VOCAB) for _ in range(count)]


def random_load(rng: random.Random, count: int, longest: int, most_new: int) -> list[Ask]:
    """A third high; two prompts in five begin with a prefix that others begin with too."""
    prefixes = [tokens(rng, longest // 2) for _ in range(2)]
    load = []
    for _ in range(count):
        shared = rng.choice(prefixes)[: rng.randint(0, longest // 2)] if rng.random() < 0.4 else []
        load.append(
            Ask(shared + tokens(rng, rng.randint(2, longest // 2)), rng.randint(1, most_new), rng.random() < 1 / 3)
        )
    return load


def pages_together(load: Sequence[Ask], page_size: int) -> int:
    return sum(ask.pages(page_size) for ask in load)


def load_for(seed: int, page_size: int, count: int = 6) -> list[Ask]:
    """A random load whose prompts have up to LONGEST tokens."""
    return random_load(random.Random(seed), count, LONGEST[page_size], 16)


def pool_for(load: Sequence[Ask], page_size: int, share: float) -> int:
    """`share` of what all need together, but not less than the largest one needs."""
    return max(int(share * pages_together(load, page_size)), *(ask.pages(page_size) for ask in load))


def make_engine(layer_num: int, num_pages: int, page_size: int, **options: Any) -> Engine:
    """An engine over a tiny model; `host_pages` gives the host pool in pages."""
    model = tiny_model(layer_num)
    if "host_pages" in options:
        page_bytes = 2 * layer_num * page_size * model.num_kv_heads * model.head_dim * 4
        options["host_memory"] = options.pop("host_pages") * page_bytes
    options.setdefault("prefill_chunk", 8 * page_size)
    return Engine(EngineConfig(device="cpu", num_pages=num_pages, page_size=page_size, **options), loaded=model)


def drive(engine: Engine, max_steps: int = 3000, max_idle: int = 40) -> int:
    """Step to the end; the books are recounted after every step. Fails if `max_idle` steps in a row compute nothing."""
    idle = steps = 0
    before = progress(engine)
    while engine.scheduler.has_work:
        engine.step()
        engine.check()
        steps += 1
        after = progress(engine)
        idle = idle + 1 if after == before else 0
        before = after
        assert idle < max_idle, f"{idle} steps without progress: {queues(engine)}"
        assert steps < max_steps, f"not done after {steps} steps: {queues(engine)}"
    return steps


def progress(engine: Engine) -> tuple[int, int]:
    stats = engine.stats()
    return stats["generated_tokens"], stats["prefill_tokens"]


def queues(engine: Engine) -> dict[str, list[str]]:
    scheduler = engine.scheduler
    return {
        name: [f"{r.id}:{r.state.value}:{r.num_computed}/{r.num_tokens}" for r in getattr(scheduler, name)]
        for name in ("waiting", "running", "parked")
    }


def answers(engine: Engine, load: Sequence[Ask], sampling: dict[str, Any] | None = None) -> list[list[int]]:
    """Queue all, drive to the end."""
    names = [
        engine.add_request(
            ask.prompt, SamplingParams(max_new_tokens=ask.max_new_tokens, **(sampling or {})), ask.is_high
        )
        for ask in load
    ]
    drive(engine)
    return [engine.output(name).token_ids for name in names]


def ample_answers(
    layer_num: int, load: Sequence[Ask], page_size: int, sampling: dict[str, Any] | None = None
) -> list[list[int]]:
    """With memory for everything at once, prompts in one chunk, nothing shared."""
    engine = make_engine(
        layer_num, pages_together(load, page_size) + 8, page_size, prefill_chunk=64 * page_size, prefix_cache=False
    )
    out = answers(engine, load, sampling)
    stats = engine.stats()
    assert stats["halvings_low"] == stats["halvings_high"] == stats["parkings"] == stats["retractions"] == 0
    return out


def drop_cache(engine: Engine) -> None:
    engine.memory.drop_cache()
    engine.allocator.restore_widths()


def assert_clean(engine: Engine) -> None:
    """Nothing is held by anybody: pages, host pages, rows, tree."""
    drop_cache(engine)
    engine.check()
    ledger = engine.allocator.ledger
    assert engine.allocator.num_free_pages == ledger.geometry.num_pages
    assert len(ledger.host_free) == ledger.num_host_pages
    assert not ledger.occupied.any()
    assert not ledger.host_parked.any()
    assert engine.memory.pool.available_size() == engine.memory.pool.size
    assert not engine.memory.pool.req_to_token.any()
    assert engine.prefix_cache is None or engine.prefix_cache.num_nodes == 0
    assert queues(engine) == {"waiting": [], "running": [], "parked": []}


def slots_of(engine: Engine, request: Request) -> np.ndarray:
    """Combined ids of the request's pages, first to last."""
    return engine.memory.slots_of([request])[0]


def locs_of(engine: Engine, request: Request) -> torch.Tensor:
    """Encoded locations of all its computed tokens."""
    return engine.memory.pool.req_to_token[request.row, : request.num_computed].to(torch.int64)


@dataclass
class LogitWatch:
    """What `watch_logits` saw."""

    compared: int = 0
    worst: float = 0.0
    one_part_steps: int = 0  # steps with narrowed slots, all staged at once
    several_parts_steps: int = 0
    two_widths_in_parts: int = 0  # steps of several parts with slots of two narrow widths


@contextmanager
def watch_logits(engine: Engine, monkeypatch: Any, tolerance: float = LOGIT_TOLERANCE) -> Iterator[LogitWatch]:
    """Every row of logits that the engine samples from is compared with a forward without a cache."""
    seen, run, forward = LogitWatch(), engine.runner.run, runner_module.forward_packed

    def watched(work: list[tuple[Request, int]]) -> list[tuple[Request, int]]:
        sequences = [r.all_tokens() for r, n in work if r.num_computed + n == r.num_tokens]

        def compare(*args: Any) -> torch.Tensor:
            logits = forward(*args)
            narrow = engine.backend._batch.narrow
            if narrow is not None:
                seen.one_part_steps += narrow.schedule.num_parts == 1
                seen.several_parts_steps += narrow.schedule.num_parts > 1
                widths = {int(level) for level in narrow.level.unique() if level > 0}
                seen.two_widths_in_parts += narrow.schedule.num_parts > 1 and len(widths) > 1
            for row, sequence in zip(logits, sequences, strict=True):
                right = plain_logits(engine.model, sequence)
                gap = float((row - right).abs().max() / right.abs().max())
                assert gap < tolerance, f"step {engine.scheduler.num_steps}: logits off by {gap}"  # NaN fails too
                seen.worst, seen.compared = max(seen.worst, gap), seen.compared + 1
            return logits

        with monkeypatch.context() as patch:
            patch.setattr(runner_module, "forward_packed", compare)
            return run(work)

    engine.runner.run = watched  # type: ignore[method-assign]
    yield seen
    engine.runner.run = run  # type: ignore[method-assign]


def poison_staging(engine: Engine) -> int:
    """NaN in every cell of every staging page; the number of pages."""
    pool, ledger = engine.device_pool, engine.allocator.ledger
    pages = np.flatnonzero(ledger.page_code == DYNAMIC)
    shape = (pool.geometry.layer_num, pool.geometry.page_stride, -1)
    for flat in (pool.k_flat, pool.v_flat):
        flat.view(shape)[:, torch.from_numpy(pages)] = float("nan")
    return len(pages)


def poison_everything(engine: Engine) -> None:
    """NaN in all memory that nobody has written yet: the pool, its sink page, and the host pool."""
    for pool in (engine.device_pool, engine.host_pool):
        pool.k_flat.fill_(float("nan"))
        pool.v_flat.fill_(float("nan"))
