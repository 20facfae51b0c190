"""How long a step takes on a machine that is not here. All constants of the replay are here, each with its source.

    decode_s   = weight_bytes / device_rate + layers * overhead_a_layer(batch) + all_reduce + kv_bytes / device_rate
    prefill_s  = 2 * parameters * tokens / matmul_rate
               + 4 * q_heads * head_dim * layers * (sum of contexts) / attention_rate
    compute_s  = decode_s + max(0, prefill_s - weight_bytes / device_rate)     one packed step reads the weights once
                 and with new prompt tokens at least prefill_floor_s           launched kernel by kernel from Python
    step_s     = max(compute_s, (streamed_bytes + behind_bytes) / link_rate) + moves_s
                 + narrow_step_s if anything is streamed                       planned only after the last one's end
    moves_s    = device_bytes / device_rate + (to_host_bytes + from_host_bytes) / link_rate

Streaming overlaps with the step that reads it, layer by layer, and pages of paused requests come in under a step that
does not read them (`pressure/behind.py`). Repacks, parking and all else that comes back run on the compute stream
between two steps, so they are added.

The two host terms are 0 in the presets "H200" and "H100", which say what the device and the link allow, and as measured
in "H200-host".

Example, H200 and Llama-3.1-8B: 128 requests of 1,024 tokens decode in 10.0 ms; 2,048 prompt tokens alone take 53.6 ms.
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
    narrow_step_s: float = 0.0


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
            # 41,000 prompt tokens/s of an 8.03e9-parameter model: 84 % of the 780 TFLOP/s that a bf16 matmul reaches.
            matmul_rate=41_000 * 2 * 8.03e9,
            attention_rate=390e12,
            host_bytes=512 << 30,
            source="device copy 4.2 TB/s, pinned host to device 55 GB/s, bf16 matmul 780 TFLOP/s, prefill 41k tok/s of "
            "Llama-3.1-8B: measured (benchmarks/results/2026-12-01-h200/engine.json, batch 32). Attention in prefill "
            "at half the matmul rate, 512 GiB of host memory: assumed",
        ),
        Machine(
            name="H100",
            device_rate=4.2e12 * 3.35 / 4.8,
            link_rate=55e9,
            matmul_rate=41_000 * 2 * 8.03e9,
            attention_rate=390e12,
            host_bytes=512 << 30,
            source="not measured: the H200's figures, device memory scaled by the data sheets' 3.35 : 4.8 TB/s",
        ),
    )
}

_HOST = replace(
    MACHINES["H200"],
    name="H200-host",
    prefill_floor_s=27e-3,
    narrow_step_s=6e-3,
    source=MACHINES["H200"].source + ". The engine's host part as measured: steps with a prompt chunk take 22 to 32 ms "
    "whatever their size, narrowed steps 5 to 7 ms more than link and computation "
    "(benchmarks/results/2026-12-01-h200/summary.md)",
)
MACHINES[_HOST.name] = _HOST

MODELS: dict[str, ModelShape] = {
    shape.name: shape
    for shape in (
        ModelShape("llama-3.1-8b", 8.03e9, 32, 32, 8, 128, 1, "config.json of meta-llama/Llama-3.1-8B"),
        ModelShape("qwen3-8b", 8.19e9, 36, 32, 8, 128, 1, "config.json of Qwen/Qwen3-8B"),
        ModelShape("llama-3.1-70b", 70.6e9, 80, 64, 8, 128, 4, "config.json of meta-llama/Llama-3.1-70B; 4 GPUs"),
    )
}

# Decode step of our engine on a H200, Llama-3.1-8B, at batch 1, 32 and 128, prompts of 1,024 tokens and halfway through
# 128 of output (benchmarks/results/2026-12-01-h200/engine.json; SGLang: 5.05, 6.2 and 13.0 ms). What the bytes do not
# explain is overhead, and is spread over the 32 layers.
MEASURED_BATCH = (1, 32, 128)
MEASURED_DECODE_S = (4.72e-3, 5.95e-3, 10.3e-3)
MEASURED_CONTEXT = 1024 + 64
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
        host_s = self.machine.narrow_step_s if load.streamed_bytes else 0.0
        return (
            max(self.compute_s(load), (load.streamed_bytes + load.behind_bytes) / self.link_rate)
            + self.moves_s(load)
            + host_s
        )

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
    batch = np.array(MEASURED_BATCH)
    explained = (2 * shape.parameters + batch * MEASURED_CONTEXT * shape.token_bytes) / machine.device_rate
    return (np.array(MEASURED_DECODE_S) - explained) / shape.layer_num


def _interpolate(batch: int, at: Sequence[float] | np.ndarray) -> float:
    """Linear between the measured batches; beyond the last one the last slope goes on."""
    sizes = MEASURED_BATCH
    if batch > sizes[-1]:
        return float(at[-1] + (batch - sizes[-1]) * (at[-1] - at[-2]) / (sizes[-1] - sizes[-2]))
    return float(np.interp(batch, sizes, at))
