"""How long a step takes on a machine that is not here. All constants of the replay are here, each with its source.

    decode_s   = weight_bytes / device_rate + layers * overhead_a_layer(batch) + all_reduce + kv_bytes / device_rate
    prefill_s  = 2 * parameters * tokens / matmul_rate
               + 4 * q_heads * head_dim * layers * (sum of contexts) / attention_rate
    compute_s  = decode_s + max(0, prefill_s - weight_bytes / device_rate)     one packed step reads the weights once
                 and with new prompt tokens at least prefill_floor_s           launched kernel by kernel from Python
    step_s     = max(compute_s, (streamed_bytes / streamed_share + behind_bytes) / link_rate) + moves_s + host_s
    host_s     = serial_step_s if anything is narrow                           planned only after the last one's end
               + narrow_step_s if anything is streamed, narrow_chunk_s with new prompt tokens
               + behind_step_s if pages come in under it
               + unhidden_link * streamed_bytes / link_rate with new prompt tokens
    moves_s    = device_bytes / device_rate + (to_host_bytes + from_host_bytes) / link_rate

Streaming overlaps with the step that reads it, layer by layer, and pages of paused requests come in under a step that
does not read them (`pressure/behind.py`). Repacks, parking and all else that comes back run on the compute stream
between two steps, so they are added.

The host's terms (`prefill_floor_s` and all of `host_s`) are 0 in the presets "H200" and "H100", which say what the
device and the link allow, and as measured in "H200-host" and, of an engine that launches nothing ahead while anything
is narrow, in "H200-serial".

Example, H200 and Llama-3.1-8B: 128 requests of 1,024 tokens decode in 10.0 ms; 2,048 prompt tokens alone take 49.8 ms.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from tidekv.engine.streaming_policy import StepRates
from tidekv.errors import ConfigError


@dataclass(frozen=True)
class Machine:
    """Rates of one GPU and its link. Bytes a second, FLOP a second."""

    name: str
    device_rate: float
    link_rate: float
    matmul_rate: float
    attention_rate: float
    host_bytes: int
    source: str
    prefill_floor_s: float = 0.0
    serial_step_s: float = 0.0
    narrow_step_s: float = 0.0
    narrow_chunk_s: float = 0.0
    behind_step_s: float = 0.0
    unhidden_link: float = 0.0
    streamed_share: float = 1.0
    launches_ahead: bool = False  # the next step is planned while this one runs: who arrives meanwhile is not in it


@dataclass(frozen=True)
class ModelShape:
    """A model in bf16, spread over `num_gpus` (tensor parallel)."""

    name: str
    parameters: float
    layer_num: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    num_gpus: int
    source: str

    @property
    def token_bytes(self) -> int:
        """K and V of one token in all layers."""
        return 2 * self.layer_num * self.num_kv_heads * self.head_dim * torch.bfloat16.itemsize


MACHINES: dict[str, Machine] = {
    machine.name: machine
    for machine in (
        Machine(
            name="H200",
            device_rate=4.2e12,
            link_rate=55e9,
            # 46,000 prompt tokens/s of an 8.03e9-parameter model: 95 % of the 780 TFLOP/s that a bf16 matmul reaches.
            matmul_rate=46_000 * 2 * 8.03e9,
            attention_rate=260e12,
            host_bytes=512 << 30,
            source="device copy 4.2 TB/s, pinned host to device 55 GB/s, bf16 matmul 780 TFLOP/s: measured "
            "(benchmarks/results/2026-12-01-h200/engine.json). Prompts: least squares over stretches of steps with "
            "chunks of 1,024 tokens and more gave 45,100 tok/s and 290 TFLOP/s of attention on one workload, 48,000 "
            "and 240 on another (benchmarks/results/2026-12-01-h200-validation/). 512 GiB of host memory: assumed",
        ),
        Machine(
            name="H100",
            device_rate=4.2e12 * 3.35 / 4.8,
            link_rate=55e9,
            matmul_rate=46_000 * 2 * 8.03e9,
            attention_rate=260e12,
            host_bytes=512 << 30,
            source="not measured: the H200's figures, device memory scaled by the data sheets' 3.35 : 4.8 TB/s",
        ),
    )
}

_SERIAL = replace(
    MACHINES["H200"],
    name="H200-serial",
    prefill_floor_s=33e-3,
    serial_step_s=2.5e-3,
    narrow_step_s=2.7e-3,
    narrow_chunk_s=2.7e-3,
    behind_step_s=1.5e-3,
    unhidden_link=0.65,
    source=MACHINES["H200"].source
    + ". The host's part of an engine that launches nothing ahead while anything is narrow and streams by a kernel "
    "beside prompts' chunks too, as on CUDA 12, medians of "
    "benchmarks/results/2026-12-01-h200-replay/replay_steps.json: chunks of 1 to 1,200 "
    "prompt tokens 32 to 36 ms whatever their size; decode steps of 9 to 17 requests while something is narrow 8.2 ms "
    "for 5.7, that stream 11.0 ms, that pages come in under 9.8 ms, of which the copies' 4 ms are hidden; chunks of "
    "2,048 tokens that stream 17, 25 and 42 ms of the link 76, 82 and 95 ms for 55",
)
_HOST = replace(
    MACHINES["H200"],
    name="H200-host",
    prefill_floor_s=20e-3,
    narrow_step_s=0.5e-3,
    narrow_chunk_s=5e-3,
    behind_step_s=0.3e-3,
    streamed_share=0.92,
    launches_ahead=True,
    source=MACHINES["H200"].source
    + ". The host's part (benchmarks/results/2026-12-01-h200-validation/, host.md): a chunk of one page takes 20.6 ms "
    "there, and one of 256 tokens 11 to 26 in two other runs; decode steps that stream take 0.3 ms (chats) and 1.3 "
    "(code) longer, those that pages come in under 0.35 and 0.9; a chunk that streams 5.2 and 5.9, whatever it "
    "streams. Decode steps with 4 and 16 of 32 requests narrowed, and 16 and 64 of 128, take 6.94, 23.5, 23.6 and "
    "91.9 ms, for 6.21, 6.26, 9.99 and 10.3 at full width and 5.30, 21.2, 21.2 and 84.7 of the link at 53.9 GB/s "
    "(benchmarks/results/2026-12-01-h200/)",
)
MACHINES |= {machine.name: machine for machine in (_HOST, _SERIAL)}

MODELS: dict[str, ModelShape] = {
    shape.name: shape
    for shape in (
        ModelShape("llama-3.1-8b", 8.03e9, 32, 32, 8, 128, 1, "config.json of meta-llama/Llama-3.1-8B"),
        ModelShape("qwen3-8b", 8.19e9, 36, 32, 8, 128, 1, "config.json of Qwen/Qwen3-8B"),
        ModelShape("llama-3.1-70b", 70.6e9, 80, 64, 8, 128, 4, "config.json of meta-llama/Llama-3.1-70B; 4 GPUs"),
    )
}

# Decode steps of our engine on a H200, Llama-3.1-8B: medians of steps between others of the same batch, contexts of 200
# to 4,200 tokens side by side (benchmarks/results/2026-12-01-h200-replay/replay_steps.json, unlimited); the last with
# 128 equal contexts of 1,088 (benchmarks/results/2026-12-01-h200/engine.json; SGLang: 13.0 ms). 32 equal contexts of
# 1,088 take 5.95 ms where 24 unequal ones of the same sum take 7.08. What the bytes do not explain is overhead, and is
# spread over the 32 layers.
MEASURED_BATCH = (1, 7, 13, 24, 128)
MEASURED_CONTEXT = (2952, 13823, 27909, 35574, 128 * 1088)  # tokens in all
MEASURED_DECODE_S = (4.99e-3, 5.50e-3, 6.07e-3, 7.08e-3, 10.3e-3)
MEASURED_MODEL, MEASURED_MACHINE = "llama-3.1-8b", "H200"

# Two all-reduces a layer across NVLink, 15 us each at decode sizes. Assumed, not measured.
ALL_REDUCE_S = 15e-6


@dataclass(frozen=True)
class StepLoad:
    """What one step has to do. Token counts, and K and V bytes together.

    decode_batch, decode_context   requests that decode, and tokens of context they read in all
    prefill_tokens                 new prompt tokens
    prefill_context_sum            for every new prompt token the tokens that it attends to, summed
    """

    decode_batch: int = 0
    decode_context: int = 0
    prefill_tokens: int = 0
    prefill_context_sum: int = 0
    streamed_bytes: int = 0
    device_bytes: int = 0
    to_host_bytes: int = 0
    from_host_bytes: int = 0  # before the step
    behind_bytes: int = 0  # from the host under the step
    any_narrow: bool = False  # in the pool, whoever it belongs to: then no step is launched ahead of the last one's end


class CostModel:
    """Seconds of a step of `shape` on `machine`. Pure: the same load costs the same."""

    def __init__(self, machine: Machine, shape: ModelShape) -> None:
        self.machine, self.shape = machine, shape
        self.device_rate = machine.device_rate * shape.num_gpus
        self.link_rate = machine.link_rate * shape.num_gpus  # every GPU has its own link and its share of the KV heads
        self.weights_s = 2 * shape.parameters / self.device_rate
        self._overhead_s = _overhead_a_layer() * shape.layer_num
        self._reduce_s = 2 * shape.layer_num * ALL_REDUCE_S if shape.num_gpus > 1 else 0.0

    def decode_s(self, batch: int, context_tokens: int) -> float:
        """One decode step of `batch` requests that read `context_tokens` in all."""
        return (
            self.weights_s
            + _interpolate(batch, self._overhead_s)
            + self._reduce_s
            + context_tokens * self.shape.token_bytes / self.device_rate
        )

    def prefill_s(self, tokens: int, context_sum: int) -> float:
        """New prompt tokens alone, their attention counted in."""
        shape, gpus = self.shape, self.shape.num_gpus
        attention = 4 * shape.num_q_heads * shape.head_dim * shape.layer_num * context_sum
        matmul = 2 * shape.parameters * tokens
        return matmul / (self.machine.matmul_rate * gpus) + attention / (self.machine.attention_rate * gpus)

    def compute_s(self, load: StepLoad) -> float:
        """The step without any bytes over the link."""
        decode = self.decode_s(load.decode_batch, load.decode_context)
        seconds = decode + max(0.0, self.prefill_s(load.prefill_tokens, load.prefill_context_sum) - self.weights_s)
        return max(seconds, self.machine.prefill_floor_s) if load.prefill_tokens else seconds

    def moves_s(self, load: StepLoad) -> float:
        """Repacks, parking and restoring before the step."""
        return load.device_bytes / self.device_rate + (load.to_host_bytes + load.from_host_bytes) / self.link_rate

    def step_s(self, load: StepLoad) -> float:
        """The whole step."""
        link_s = (load.streamed_bytes / self.machine.streamed_share + load.behind_bytes) / self.link_rate
        return max(self.compute_s(load), link_s) + self.moves_s(load) + self.host_s(load)

    def host_s(self, load: StepLoad) -> float:
        """What the host, and copies beside a prompt's chunk, add to the step."""
        machine = self.machine
        seconds = machine.serial_step_s * load.any_narrow
        seconds += machine.behind_step_s * (load.behind_bytes > 0)
        if load.prefill_tokens:
            seconds += machine.unhidden_link * load.streamed_bytes / self.link_rate
        if load.streamed_bytes:
            seconds += machine.narrow_chunk_s if load.prefill_tokens else machine.narrow_step_s
        return seconds

    def step_rates(self) -> StepRates:
        """The straight lines that the scheduler plans with: all that it knows of the machine is configured."""
        first, last = MEASURED_BATCH[0], MEASURED_BATCH[-1]
        base = self.decode_s(first, 0)
        return StepRates(
            link_rate=self.link_rate,
            base_s=base,
            request_s=(self.decode_s(last, 0) - base) / (last - first),
            context_s=self.shape.token_bytes / self.device_rate,
            prompt_s=self.prefill_s(1, 0),
            narrow_step_s=self.machine.narrow_step_s,
            narrow_chunk_s=self.machine.narrow_chunk_s,
            behind_step_s=self.machine.behind_step_s,
            unhidden_link=self.machine.unhidden_link,
            serial_step_s=self.machine.serial_step_s,
        )


def cost_model(machine: str, model: str) -> CostModel:
    """A preset by name; `ConfigError` lists the names there are."""
    if machine not in MACHINES:
        raise ConfigError(f"machine must be one of {', '.join(MACHINES)}, got {machine!r}")
    if model not in MODELS:
        raise ConfigError(f"model preset must be one of {', '.join(MODELS)}, got {model!r}")
    return CostModel(MACHINES[machine], MODELS[model])


def _overhead_a_layer() -> np.ndarray:
    """Seconds a layer at each of `MEASURED_BATCH`: what weights and KV bytes leave unexplained."""
    machine, shape = MACHINES[MEASURED_MACHINE], MODELS[MEASURED_MODEL]
    explained = (2 * shape.parameters + np.array(MEASURED_CONTEXT) * shape.token_bytes) / machine.device_rate
    return (np.array(MEASURED_DECODE_S) - explained) / shape.layer_num


def _interpolate(batch: int, at: Sequence[float] | np.ndarray) -> float:
    """Linear between the measured batches; beyond the last one the last slope goes on."""
    sizes = MEASURED_BATCH
    if batch > sizes[-1]:
        return float(at[-1] + (batch - sizes[-1]) * (at[-1] - at[-2]) / (sizes[-1] - sizes[-2]))
    return float(np.interp(batch, sizes, at))
