"""Narrowed decode steps of SGLang's models, captured and replayed (`attention/captured_steps`).

SGLang's own graphs are captured over its attention kernels and know nothing of slots. Here the same model is captured
over the core's attention; sampling stays SGLang's. A step whose shape was not seen before runs launch by launch.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from sglang.srt.distributed.parallel_state import graph_capture
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context
from sglang.srt.model_executor.runner_utils.capture_mode import model_capture_mode

from tidekv.attention.captured_steps import CapturedStep, DecodeGraphs, StepShape
from tidekv.attention.page_tables import HostBatch, HostNarrow
from tidekv.errors import InvariantError
from tidekv.sglang_plugin.attention import TideAttention
from tidekv.streaming.schedule import build_schedule

# Fewer than SGLang captures: a narrowed step may have either of several shapes for each, and a decode step takes the
# same time for 17 requests as for 32. Tables of 64 pages are 4k tokens at the usual page size.
SIZES = (8, 16, 32, 64, 128, 256)
MIN_WIDTH = 64


class NarrowGraphs:
    """One for each model runner. capture: False runs the steps over the same buffers launch by launch, on the CPU."""

    def __init__(self, runner: Any, attention: TideAttention, *, capture: bool) -> None:
        self.runner, self.attention = runner, attention
        self.steps = DecodeGraphs(
            self._forward, attention.tide_core, capture=capture, session=lambda: capture_session(runner),
            sizes=SIZES, min_width=MIN_WIDTH, width_factor=4,
        )  # fmt: skip
        self.is_prepared = False
        self._live: Any = None  # SGLang's batch of the step at hand
        self._batches: dict[StepShape, Any] = {}  # SGLang's batches over the buffers of captured steps

    def run(self, batch: HostBatch, forward_batch: Any) -> LogitsProcessorOutput | None:
        """The step's logits, valid until the next step; None if it is to be launched layer by layer."""
        if not forward_batch.forward_mode.is_decode():
            return None
        reason = self.why_not(forward_batch)
        if reason is not None:
            self.steps.report_eager(reason)
            return None
        self._live = forward_batch
        try:
            logits = self.steps.run(batch, forward_batch.input_ids, forward_batch.positions)
        finally:
            self._live = None
        return None if logits is None else LogitsProcessorOutput(next_token_logits=logits)

    def prepare(self, forward_batch: Any) -> None:
        """Capture what a server that reads windows will need, before it is needed: a capture takes as long as a dozen
        steps. forward_batch: any decode step; what differs between steps is not taken from it."""
        self.is_prepared = True
        if self.attention.tide.window is None or self.why_not(forward_batch) is not None:
            return
        most = int(self.runner.max_running_requests)
        self._live = forward_batch
        try:
            for size in [size for index, size in enumerate(SIZES) if index == 0 or SIZES[index - 1] < most]:
                batch = nothing_but_old_pages(size, self.attention.tide.core.geometry.layer_num)
                shape = self.steps.shape(batch)
                if isinstance(shape, StepShape):
                    ids = torch.zeros(size, dtype=torch.int64, device=forward_batch.input_ids.device)
                    self.steps.make(shape, batch, ids, ids)
        finally:
            self._live = None

    def why_not(self, forward_batch: Any) -> str | None:
        """What of SGLang's batch lies in no buffer of a captured step."""
        if forward_batch.capture_hidden_mode not in (None, CaptureHiddenMode.NULL):
            return "it returns hidden states"
        if getattr(self.runner, "lora_manager", None) is not None:
            return "LoRA is on"
        if forward_batch.global_num_tokens_cpu is not None:
            return "ranks have padded it"
        for name in ("mrope_positions", "input_embeds", "replace_embeds", "encoder_lens", "spec_info"):
            if getattr(forward_batch, name, None) is not None:
                return f"it has {name}"
        return None

    def _forward(self, step: CapturedStep) -> torch.Tensor:
        batch = self._batches.get(step.shape)
        if batch is None:
            batch = self._batches[step.shape] = static_batch(self._live, step)
        with forward_context(ForwardContext(attn_backend=self.attention)), self.attention.in_core():
            out = self.runner.model.forward(step.input_ids, step.positions, batch)
        if not isinstance(out, LogitsProcessorOutput) or out.next_token_logits is None:
            raise InvariantError(f"the model gave {type(out).__name__} without next-token logits for a decode step")
        logits: torch.Tensor = out.next_token_logits
        return logits


def nothing_but_old_pages(size: int, layer_num: int) -> HostBatch:
    """A decode step of `size` requests in the sink page that streams nothing, as those of windows."""
    none, zeros = np.zeros(0, dtype=np.int64), np.zeros(size, dtype=np.int64)
    pages, levels = np.zeros((size, 1), dtype=np.int64), np.zeros(size, dtype=np.int8)
    resident = np.zeros((1, layer_num), dtype=np.int32)
    schedule = build_schedule(resident, none, none, none, none, 1, 0)
    narrow = HostNarrow(schedule, levels[:, None], (pages,), levels, zeros, True)
    return HostBatch(zeros + 1, zeros + 1, pages, zeros, narrow, None)


def static_batch(live: Any, step: CapturedStep) -> Any:
    """A batch of SGLang's over the step's buffers: what differs from step to step is taken from there, or is not read
    by a decode step without it."""
    batch = copy.copy(live)
    batch.batch_size = step.shape.size
    batch.input_ids, batch.positions = step.input_ids, step.positions
    batch.seq_lens = batch.orig_seq_lens = step.batch.kv_lens_dev
    batch.out_cache_loc = step.batch.locs
    batch.req_pool_indices = torch.zeros_like(step.input_ids)
    batch.seq_lens_cpu = batch.seq_lens_sum = batch.sampling_info = batch.rids = batch.lora_ids = None
    batch.next_token_logits_buffer = None
    if batch.num_token_non_padded is not None:
        batch.num_token_non_padded = torch.full_like(batch.num_token_non_padded, step.shape.size)
    return batch


@contextmanager
def capture_session(runner: Any) -> Iterator[None]:
    """SGLang's own surroundings of a capture: models take other paths in it, collective operations register buffers."""
    several = runner.tp_group.world_size > 1
    with model_capture_mode(), graph_capture() if several else nullcontext():
        yield
