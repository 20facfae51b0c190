"""The embedded engine: continuous batching over a layer-elastic cache, end to end, with nothing else installed.

step() = scheduler.plan()  who runs, and memory for them (here pages narrow, merge, park)
         runner.launch()   one packed forward over whatever is narrow, and sampling
         finish            stop tokens, prefix cache, widths back when memory is plentiful
"""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol, get_args

import torch

from tidekv.allocator import DynamicPagedTokenToKVPoolAllocator
from tidekv.attention.backend import AttentionBackend, AttentionKind
from tidekv.engine.memory import RequestMemory
from tidekv.engine.model import LoadedModel, load_model
from tidekv.engine.narrow_scheduler import NarrowScheduler
from tidekv.engine.page_books import PageBooks
from tidekv.engine.prefix_cache import PrefixCache
from tidekv.engine.read_modes import ReadModes, Reads
from tidekv.engine.request import Request, RequestOutput, RequestState
from tidekv.engine.runner import Launched, Runner
from tidekv.engine.sampling import SamplingParams
from tidekv.engine.scheduler import PRESSURES, Pressure, Scheduler
from tidekv.engine.streaming_policy import StepRates, narrowing_pays
from tidekv.errors import ConfigError
from tidekv.geometry import KVGeometry
from tidekv.memory.device_pool import DeviceKVPool
from tidekv.memory.host_pool import HostKVPool
from tidekv.memory.ledger import HIGH, LOW
from tidekv.memory.req_to_token import ReqToTokenPool
from tidekv.streaming.streamer import Streamer

Priority = bool | Literal["high", "low"]
_UNITS = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}


def parse_bytes(name: str, value: int | str) -> int:
    """`value` in bytes: an int, or text such as "512MiB", "2GB", "1.5g" (all binary units)."""
    if isinstance(value, int):
        return value
    match = re.fullmatch(r"\s*(\d+\.?\d*|\.\d+)\s*([kmgt]?)i?b?\s*", value.lower())
    if match is None:
        raise ConfigError(f"{name} must be bytes or text such as '512MiB' or '2GiB', got {value!r}")
    return int(float(match[1]) * _UNITS[match[2]])


def as_priority(value: Priority) -> bool:
    """True for high. Accepts True and False, "high" and "low"; `ConfigError` for anything else."""
    known: dict[object, bool] = {True: True, False: False, "high": True, "low": False}
    if value not in known:
        raise ConfigError(f"a priority is True or 'high', False or 'low', got {value!r}")
    return known[value]


@dataclass(frozen=True)
class EngineConfig:
    """How an engine is built. Give `num_pages` or `kv_memory`; every other value has a default that works.

    model            "smollm2" (packaged weights), a folder, a Hub id, or "random:SHAPE"
    device, dtype    default: CUDA with bfloat16 if there is a GPU, else CPU with float32
    num_pages        pages of the device pool; or kv_memory: bytes for it (int, or "2GiB")
    host_memory      bytes for layers that leave the device; default: 4 times the device pool
    pressure         "narrow", "retract", "swap", "reserve": what happens when pages run out
    attention_backend  "auto": FlashInfer where it is installed and compiled for the model, else our Triton kernel;
                     "flashinfer" has it compiled, or raises with what is missing; "triton". On the CPU only "auto"
    prefill_chunk    prompt tokens a step at most
    overlap          plan a decode step while the GPU still computes the one before; None: on CUDA
    write_through    low-priority KV goes to the host as it is produced
    rates            what steps and the link cost; the same on every rank. With them "narrow" is scheduled by a budget
                     of streaming (`NarrowScheduler`); None: the ladder alone, narrowed requests take turns by staging.
                     If they say that steps get longer by more than `high_share` only because something is narrow,
                     nothing narrows: requests move to the host whole, as under "swap" (`narrows`)
    high_share       how much longer a step of high priority may take so that others get width back
    high_reads,      "exact"; or "window", LOSSY: the class reads its first page and its last `window_tokens` in every
    low_reads        layer, and what is older only in the layers that are resident (`read_modes`)
    """

    model: str = "smollm2"
    device: str | None = None
    dtype: torch.dtype | None = None
    num_pages: int | None = None
    kv_memory: int | str | None = None
    page_size: int = 16
    host_memory: int | str | None = None
    pressure: Pressure = "narrow"
    attention_backend: AttentionKind = "auto"
    prefill_chunk: int = 512
    overlap: bool | None = None
    max_running: int = 64
    max_context_len: int | None = None
    prefix_cache: bool = True
    write_through: bool = False
    low_max_pages: int | float | None = None
    high_reserved_pages: int | float | None = None
    dynamic_max_pages: int | float | None = None
    min_slot_width: int = 2
    rates: StepRates | None = None
    high_share: float = 0.05
    high_reads: Reads = "exact"
    low_reads: Reads = "exact"
    window_tokens: int = 1024

    def __post_init__(self) -> None:
        if self.pressure not in PRESSURES:
            raise ConfigError(f"pressure must be one of {', '.join(PRESSURES)}, got {self.pressure!r}")
        if self.attention_backend not in get_args(AttentionKind):
            valid = ", ".join(get_args(AttentionKind))
            raise ConfigError(f"attention_backend must be one of {valid}, got {self.attention_backend!r}")
        if (self.num_pages is None) == (self.kv_memory is None):
            raise ConfigError("give exactly one of num_pages (pages) and kv_memory (bytes)")
        for name in ("page_size", "prefill_chunk", "max_running", "window_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be >= 1, got {getattr(self, name)}")
        if self.prefill_chunk % self.page_size:
            raise ConfigError(f"prefill_chunk {self.prefill_chunk} must be a multiple of page_size {self.page_size}")
        if self.read_modes.any_lossy and (self.rates is None or self.pressure != "narrow"):
            raise ConfigError(
                f"high_reads={self.high_reads!r}, low_reads={self.low_reads!r}: a lossy mode is scheduled by cost; "
                "it needs pressure='narrow' and rates"
            )

    @property
    def narrows(self) -> bool:
        """Pages may give up layers: `pressure` says so, and the rates do not speak against it."""
        return self.pressure == "narrow" and (self.rates is None or narrowing_pays(self.rates, self.high_share))

    @property
    def read_modes(self) -> ReadModes:
        """How each class is read."""
        return ReadModes.named(self.high_reads, self.low_reads, self.window_tokens, self.page_size)


class Executor(Protocol):
    """Computes a planned step. `Runner` does; a replay of a trace puts a cost model in its place."""

    def run(self, work: list[tuple[Request, int]]) -> list[tuple[Request, int]]:
        """Compute the planned tokens; returns (request, next token) for those whose known tokens are all computed."""


class Engine:
    """Continuous batching for one model on one device. Not thread-safe: one thread calls it.

    loaded     shares a model that is already in memory between engines
    executor   made for this engine in place of a `Runner`; then no KV exists, and only the books run (on the CPU)
    clock      seconds, monotonic
    """

    def __init__(
        self,
        config: EngineConfig,
        loaded: LoadedModel | None = None,
        *,
        executor: Callable[[Engine], Executor] | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.clock = clock
        device = config.device or ("cuda" if torch.cuda.is_available() else "cpu")
        dtype = config.dtype or (torch.bfloat16 if device.startswith("cuda") else torch.float32)
        self.config = replace(config, device=device, dtype=dtype)
        self.model = loaded or load_model(config.model, device, dtype)
        shape = KVGeometry(
            self.model.layer_num, 1, config.page_size, self.model.num_kv_heads, self.model.head_dim, dtype
        )
        pages = config.num_pages
        if pages is None:
            assert config.kv_memory is not None
            memory = parse_bytes("kv_memory", config.kv_memory)
            pages = KVGeometry.pages_for_bytes(memory, shape.page_bytes)
            if pages < 1:
                raise ConfigError(f"kv_memory {memory} holds no page: give at least {2 * shape.page_bytes} bytes")
        self.geometry = replace(shape, num_pages=pages)
        most = int(getattr(self.model.config, "max_position_embeddings", 8192))
        context = min(config.max_context_len or most, most)

        self.device_pool = DeviceKVPool(self.geometry, device if executor is None else "meta")
        host_bytes = 4 * pages * shape.page_bytes
        if config.host_memory is not None:
            host_bytes = parse_bytes("host_memory", config.host_memory)
        keeps_host = config.pressure in ("narrow", "swap")
        has_kv = executor is None
        self.host_pool = HostKVPool(
            self.geometry, host_bytes if keeps_host else 0, pin=None if has_kv else False, materialize=has_kv
        )
        if has_kv:
            req_to_token_pool = ReqToTokenPool(config.max_running, context, device)
        else:
            req_to_token_pool = PageBooks.page_rows(config.max_running, context, config.page_size)
        self.allocator = DynamicPagedTokenToKVPoolAllocator(
            pages * config.page_size,
            config.page_size,
            dtype,
            device,
            self.device_pool,
            req_to_token_pool=req_to_token_pool,
            host_pool=self.host_pool,
            low_max_pages=config.low_max_pages,
            high_reserved_pages=config.high_reserved_pages,
            dynamic_max_pages=config.dynamic_max_pages,
            # The other policies never narrow: a ladder of one width has nothing to give up.
            min_slot_width=config.min_slot_width if config.narrows else self.geometry.layer_num,
            write_through=config.write_through and config.pressure == "narrow",
        )
        self.prefix_cache = PrefixCache(config.page_size) if config.prefix_cache else None
        keeper = RequestMemory if has_kv else PageBooks
        self.memory = keeper(self.allocator, req_to_token_pool, self.prefix_cache)
        self.scheduler = self._scheduler()
        self.streamer = Streamer(self.device_pool, self.host_pool)
        self.backend = AttentionBackend(
            self.allocator.ledger, self.device_pool, self.host_pool, self.streamer, config.attention_backend
        )
        self.runner: Executor = (
            executor(self) if executor else Runner(self.model, self.memory, self.backend, config.read_modes)
        )
        overlap = device.startswith("cuda") if config.overlap is None else config.overlap
        self._ahead = self.runner if overlap and isinstance(self.runner, Runner) else None
        self._unread: Launched | None = None  # the last step, if its tokens are still on the device only
        self.requests: dict[str, Request] = {}
        self._arrivals = itertools.count()
        self._generated_tokens = self._prompt_tokens = 0

    def _scheduler(self) -> Scheduler:
        config, memory = self.config, self.memory
        if not config.narrows or config.rates is None:
            pressure: Pressure = "swap" if config.pressure == "narrow" and not config.narrows else config.pressure
            return Scheduler(memory, pressure, config.prefill_chunk, config.max_running)
        return NarrowScheduler(
            memory,
            config.prefill_chunk,
            config.max_running,
            config.rates,
            config.read_modes,
            config.high_share,
        )

    # ---- requests ----------------------------------------------------------------------------------------------

    def add_request(
        self,
        prompt: str | Sequence[int],
        sampling: SamplingParams | None = None,
        is_high_priority: Priority = False,
        request_id: str | None = None,
    ) -> str:
        """Queue a prompt (text, or token ids); returns its id. `CapacityError` at once if it can never fit."""
        order = next(self._arrivals)
        name = request_id or f"request-{order}"
        if name in self.requests:
            raise ConfigError(f"request id {name!r} is in use")
        if isinstance(prompt, str):
            if self.model.tokenizer is None:
                raise ConfigError("this model has no tokenizer: give token ids")
            ids = list(self.model.tokenizer(prompt)["input_ids"])
        else:
            ids = [int(token) for token in prompt]
        vocab = int(self.model.config.vocab_size)
        bad = [token for token in ids if not 0 <= token < vocab]
        if not ids or bad:
            raise ConfigError(f"a prompt is at least one token id in 0..{vocab - 1}, got {bad[:4] or ids}")
        params = sampling or SamplingParams()
        if params.seed is None:
            params = replace(params, seed=order)
        request = Request(name, ids, params, as_priority(is_high_priority), order, self.clock())
        self.scheduler.add(request)
        self.requests[name] = request
        return name

    def abort(self, request_id: str) -> None:
        """Stop a request in whatever state it is; its memory is free at once. Unknown or done: nothing happens."""
        request = self.requests.get(request_id)
        if request is not None and not request.is_done:
            self.scheduler.remove(request)
            request.state, request.finish_reason, request.num_unread = RequestState.ABORTED, "abort", 0
            request.finish_s = self.clock()

    def step(self) -> list[RequestOutput]:
        """One step: plan, forward, sample. Returns the requests that ended in it.

        With `overlap` the tokens of a step of nothing but decodes stay on the device, where the next step finds them,
        and are read when that one is launched, whatever is narrow. So a stop token is seen one step late; the token
        after it is dropped. Who ends by its length gives its memory back as soon as its last step is launched.
        """
        if not self.scheduler.has_work:
            return []
        before = self._unread
        launched: Launched | None = None
        sampled: list[tuple[Request, int]] = []
        with self.allocator.step():
            behind = self.allocator.repacker.behind
            try:
                plan = self.scheduler.plan()
                behind.fork()
                if plan.work and self._ahead is not None:
                    launched = self._ahead.launch(plan.work, before)
                elif plan.work:
                    sampled = self.runner.run(plan.work)
            finally:
                behind.join()
        self._unread = None  # not sooner: what interrupts the plan must not lose tokens that are sampled already
        self._prompt_tokens += sum(n for request, n in plan.work if request.state is RequestState.PREFILL)
        ended = self._take_tokens(before.read()) if before is not None else []
        if launched is not None and self._may_stay_unread(launched):
            self._unread = launched
            for request in launched.requests:
                request.num_unread = 0 if request.is_done else 1
                if not request.is_done and self._is_last(request):
                    self.memory.publish(request)
                    self.scheduler.end_soon(request)
        else:
            ended += self._take_tokens(launched.read() if launched is not None else sampled)
        self.scheduler.end_step()
        return [self.output(request.id) for request in ended]

    def _may_stay_unread(self, launched: Launched) -> bool:
        """Nothing but decodes, and not the last one of all: then the next plan needs only their number. A prompt's last
        chunk is read at once: its first token is waited for.

        Neither widths nor ends are an obstacle: the plan reads books on the host, and what it queues runs behind this
        step, whose copies have joined the compute stream by its end (`Streamer.end`, `CopiesBehind.join`). So what this
        step still reads or writes, staging, host pages and pages that its requests give back, is used again only after
        it.
        """
        going_on = [request for request in launched.requests if not request.is_done]
        if any(request.state is not RequestState.DECODE for request in going_on):
            return False
        return not going_on or not all(self._is_last(request) for request in going_on)

    def _is_last(self, request: Request) -> bool:
        """Its length ends it with the token that is sampled now."""
        return len(request.output_ids) + 1 >= request.sampling.max_new_tokens

    def _take_tokens(self, sampled: list[tuple[Request, int]]) -> list[Request]:
        """Book sampled tokens; returns the requests that ended with them, their memory given back."""
        now, ended = self.clock(), []
        for request, token in sampled:
            if request.is_done:  # it stopped, or was aborted, while this step ran
                continue
            was_unread, request.num_unread = request.num_unread, 0
            if request.state is RequestState.PREFILL and not was_unread:
                request.state = RequestState.DECODE
                self.memory.publish(request)
            if self._take_token(request, token, now):
                ended.append(request)
        for request in ended:
            self.memory.publish(request)
            self.scheduler.remove(request)
        return ended

    def book_decodes(self, requests: Sequence[Request], times_s: Sequence[float]) -> None:
        """Book that each of these requests got a token at each of these times, and none of them ended. For a replay
        that makes steps without planning them one by one; their memory and counts are the caller's."""
        for request in requests:
            request.output_ids += [0] * len(times_s)
            request.token_times_s += times_s
        self._generated_tokens += len(requests) * len(times_s)

    def _take_token(self, request: Request, token: int, now: float) -> bool:
        """Book a sampled token; True if the request ends with it."""
        request.output_ids.append(token)
        request.token_times_s.append(now)
        self._generated_tokens += 1
        if request.first_token_s is None:
            request.first_token_s = now
        stops = () if request.sampling.ignore_eos else self.model.eos_token_ids
        if token in stops or token in request.sampling.stop_token_ids:
            request.finish_reason = "stop"
        elif len(request.output_ids) >= request.sampling.max_new_tokens:
            request.finish_reason = "length"
        else:
            return False
        request.state, request.finish_s = RequestState.FINISHED, now
        return True

    def output(self, request_id: str) -> RequestOutput:
        """The result of a request that has ended."""
        request = self.requests[request_id]
        tokenizer = self.model.tokenizer
        return RequestOutput.of(request, tokenizer.decode(request.output_ids) if tokenizer is not None else None)

    def generate(
        self,
        prompts: Sequence[str | Sequence[int]],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        priorities: Sequence[Priority] | None = None,
        on_step: Callable[[Engine], None] | None = None,
    ) -> list[RequestOutput]:
        """Run prompts to their end; outputs in the order of the prompts. `priorities`: True or "high", False or "low";
        default all low.

        If one prompt is refused, those queued by this call are aborted before the error goes on.
        """
        params = list(sampling) if isinstance(sampling, Sequence) else [sampling] * len(prompts)
        high = list(priorities) if priorities is not None else [False] * len(prompts)
        if not len(prompts) == len(params) == len(high):
            raise ConfigError(
                f"{len(prompts)} prompts, {len(params)} sampling params, {len(high)} priorities: need as many of each"
            )
        names: list[str] = []
        try:
            for prompt, param, is_high in zip(prompts, params, high, strict=True):
                names.append(self.add_request(prompt, param, is_high))
            while any(not self.requests[name].is_done for name in names):
                self.step()
                if on_step is not None:
                    on_step(self)
        except BaseException:
            for name in names:
                self.abort(name)
            raise
        outputs = [self.output(name) for name in names]
        for name in names:  # the caller has them now
            del self.requests[name]
        return outputs

    # ---- figures -----------------------------------------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        """Counters since the start, JSON-ready. Bytes are K and V together."""
        allocator, moves, ledger = self.allocator, self.allocator.repacker.counters, self.allocator.ledger
        return {
            "pressure": self.config.pressure,
            "narrows": self.config.narrows,
            "high_reads": self.config.read_modes.high.label,
            "low_reads": self.config.read_modes.low.label,
            "attention": self.backend.name,
            "steps": self.scheduler.num_steps,
            "generated_tokens": self._generated_tokens,
            "prefill_tokens": self._prompt_tokens,
            "halvings_high": allocator.num_halvings[HIGH],
            "halvings_low": allocator.num_halvings[LOW],
            "merges": allocator.num_merges,
            "pages_freed": allocator.num_pages_freed,
            "restores": allocator.num_restores,
            "device_bytes_moved": moves.device_bytes,
            "bytes_to_host": moves.to_host_bytes + self.backend.host_bytes_out,
            "bytes_from_host": moves.from_host_bytes + self.streamer.bytes_in,
            "streamed_bytes": self.streamer.bytes_in,
            "parkings": self.scheduler.num_parkings,
            "retractions": self.scheduler.num_retractions,
            "recomputed_tokens": self.scheduler.recomputed_tokens,
            "host_pages_used": ledger.num_host_pages - len(ledger.host_free),
            "host_pages": ledger.num_host_pages,
            "pages": {f"{name}/{width}": n for (name, width), n in ledger.pages_by_state().items()},
        }

    def check(self) -> None:
        """Recount the books of the allocator, of the rows and of the prefix cache; `InvariantError` if anything is
        off."""
        self.allocator.check()
        self.memory.check()
        if self.prefix_cache is not None:
            self.prefix_cache.check()
