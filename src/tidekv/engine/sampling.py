"""How the next token is drawn: one row of logits, one seed, one position, and nothing else decides it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from tidekv.errors import ConfigError

GOLDEN_GAMMA = 0x9E3779B97F4A7C15  # splitmix64's step and the two multipliers of its finalizer
MIX_MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)


@dataclass(frozen=True)
class SamplingParams:
    """How one request is sampled and when it stops. Raises ConfigError for a value that cannot work."""

    max_new_tokens: int = 64
    temperature: float = 0.0  # 0 = greedy
    top_p: float = 1.0  # 1 = the whole vocabulary
    seed: int | None = None  # None: the engine picks one when the request arrives
    stop_token_ids: tuple[int, ...] = ()  # beside the model's own end-of-sequence tokens
    ignore_eos: bool = False  # the model's own end-of-sequence tokens do not stop it; stop_token_ids still do

    def __post_init__(self) -> None:
        if not _is_int(self.max_new_tokens) or self.max_new_tokens < 1:
            raise ConfigError(f"max_new_tokens={self.max_new_tokens!r}: expected an int >= 1")
        if not _is_number(self.temperature) or not 0.0 <= self.temperature < math.inf:
            raise ConfigError(f"temperature={self.temperature!r}: expected a finite number >= 0 (0 = greedy)")
        if not _is_number(self.top_p) or not 0.0 < self.top_p <= 1.0:
            raise ConfigError(f"top_p={self.top_p!r}: expected a number in (0, 1] (1 = the whole vocabulary)")
        if self.seed is not None and not (_is_int(self.seed) and 0 <= self.seed < 2**64):
            raise ConfigError(f"seed={self.seed!r}: expected None or an int in [0, 2**64)")
        if not isinstance(self.stop_token_ids, (tuple, list)) or not all(
            _is_int(token) and token >= 0 for token in self.stop_token_ids
        ):
            raise ConfigError(f"stop_token_ids={self.stop_token_ids!r}: expected a tuple of ints >= 0")
        if not isinstance(self.ignore_eos, bool):
            raise ConfigError(f"ignore_eos={self.ignore_eos!r}: expected True or False")
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))


def sample(logits: Tensor, temperatures: Tensor, top_ps: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """One token a row. Rows with temperature 0 take the largest logit (lowest id among equals), others draw by top-p.

    logits: [R, V] floating. temperatures, top_ps: [R] floating. seeds: [R] uint64 (or int64, the same bits).
    positions: [R] integers, the index in its sequence of the token to draw. All on one device, or all but logits on
    the host: then finding the rows that draw costs no sync. Returns [R] int64 on the logits' device.

    The nucleus is the smallest set of most likely tokens whose probability reaches top_p (equals in order of id). The
    draw inverts a distribution function at u = hash(seed, position) in [0, 1), so it does not depend on who else is in
    the batch, on scheduling, or on how often the row was computed.
    Raises ConfigError on shapes, dtypes or devices that do not fit. Transient memory: about 32 bytes * V a drawing row.
    """
    _check_inputs(logits, temperatures, top_ps, seeds, positions)
    tokens = torch.argmax(logits, dim=-1)  # the first of equal maxima
    uniforms = uniform_draw(seeds.view(torch.int64), positions)
    # the whole vocabulary needs no order: a row of 49k logits takes 3.4 ms so, 15.5 ms sorted (CPU, 2 busy cores)
    for rows, draw in (
        (((temperatures > 0) & (top_ps >= 1)).nonzero().squeeze(1), _draw_whole),
        (((temperatures > 0) & (top_ps < 1)).nonzero().squeeze(1), _draw_nucleus),
    ):
        if rows.numel():
            # Without a wait for the device: the driver takes a few KB along at once.
            per_row = [
                value[rows].to(logits.device, torch.float64, non_blocking=True)
                for value in (temperatures, top_ps, uniforms)
            ]
            rows = rows.to(logits.device, non_blocking=True)
            tokens[rows] = draw(logits[rows], *per_row)
    return tokens


def uniform_draw(seeds: Tensor, positions: Tensor) -> Tensor:
    """[R] float64 in [0, 1), a multiple of 2**-53: output number `positions` of the splitmix64 stream mix(seed).

    seeds: [R] int64 bits of a uint64; positions: [R] integers. The seed is mixed first: raw seeds that differ by a
    multiple of splitmix64's step would share one stream, shifted.
    """
    state = _mix64(seeds) + (positions.to(torch.int64) + 1) * _as_int64(GOLDEN_GAMMA)
    return _shift_right(_mix64(state), 11).to(torch.float64) * 2.0**-53  # 53 bits: exact in float64


def invert_cdf(running: Tensor, uniforms: Tensor, last: Tensor) -> Tensor:
    """[R, 1] int64: the first index whose running sum is above u times the sum up to and with index `last`.

    running: [R, N] running sums of weights >= 0; uniforms: [R] in [0, 1); last: [R, 1] int64. "Above", not "at least":
    a weight of 0 is never drawn, not at u = 0 either.
    """
    target = uniforms[:, None] * running.gather(1, last)
    # a parallel scan may round a running sum below the one before it, so the search alone does not promise <= last
    return torch.minimum(torch.searchsorted(running, target, right=True), last)


def _draw_whole(logits: Tensor, temperatures: Tensor, top_ps: Tensor, uniforms: Tensor) -> Tensor:
    """[R] int64 tokens of the whole vocabulary from logits [R, V]; the rest [R] float64, temperatures > 0."""
    running = _weights(logits, logits.amax(dim=-1), temperatures).cumsum(dim=-1)
    last = torch.full_like(uniforms, running.shape[1] - 1, dtype=torch.int64)
    return invert_cdf(running, uniforms, last[:, None]).squeeze(1)


def _draw_nucleus(logits: Tensor, temperatures: Tensor, top_ps: Tensor, uniforms: Tensor) -> Tensor:
    """[R] int64 tokens by top-p from logits [R, V]; the rest [R] float64, temperatures > 0."""
    ordered, token_ids = logits.sort(dim=-1, descending=True, stable=True)
    running = _weights(ordered, ordered[:, 0], temperatures).cumsum(dim=-1)
    # first index whose running sum reaches top_p of the total: where the nucleus ends
    last = torch.searchsorted(running, (top_ps * running[:, -1])[:, None]).clamp(max=running.shape[1] - 1)
    return token_ids.gather(1, invert_cdf(running, uniforms, last)).squeeze(1)


def _weights(logits: Tensor, largest: Tensor, temperatures: Tensor) -> Tensor:
    """[R, V] float64 exp((logit - largest) / temperature): probabilities but for a factor, at most 1.

    float64: in float32 the running sum of a 128k vocabulary is off by more than the mass of its rare tokens.
    """
    return ((logits.double() - largest.double()[:, None]) / temperatures[:, None]).exp()


def _mix64(bits: Tensor) -> Tensor:
    """splitmix64's finalizer on uint64 bits held as int64: multiplication wraps alike in both."""
    bits = (bits ^ _shift_right(bits, 30)) * _as_int64(MIX_MULTIPLIERS[0])
    bits = (bits ^ _shift_right(bits, 27)) * _as_int64(MIX_MULTIPLIERS[1])
    return bits ^ _shift_right(bits, 31)


def _shift_right(bits: Tensor, count: int) -> Tensor:
    """Logical shift: int64's own shift copies the sign bit, so mask it off."""
    return (bits >> count) & ((1 << (64 - count)) - 1)


def _as_int64(value: int) -> int:
    """The int64 with the bits of a uint64."""
    return value - 2**64 if value >= 2**63 else value


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _check_inputs(logits: Tensor, temperatures: Tensor, top_ps: Tensor, seeds: Tensor, positions: Tensor) -> None:
    if logits.dim() != 2 or logits.shape[1] == 0 or not logits.is_floating_point():
        raise ConfigError(f"logits: expected floating [R, V > 0], got {logits.dtype} {list(logits.shape)}")
    rows = {"temperatures": temperatures, "top_ps": top_ps, "seeds": seeds, "positions": positions}
    for name, value in rows.items():
        if value.shape != logits.shape[:1]:
            raise ConfigError(f"{name}: expected shape [{logits.shape[0]}] as logits has rows, got {list(value.shape)}")
        if value.device != temperatures.device or value.device not in (logits.device, torch.device("cpu")):
            raise ConfigError(
                f"{name} is on {value.device}: expected all rows' parameters on {logits.device}, or all on cpu"
            )
    for name in ("temperatures", "top_ps"):
        if not rows[name].is_floating_point():
            raise ConfigError(f"{name}: expected a floating dtype, got {rows[name].dtype}")
    if seeds.dtype not in (torch.uint64, torch.int64):
        raise ConfigError(f"seeds: expected uint64, or int64 with the same bits, got {seeds.dtype}")
    if positions.is_floating_point() or positions.is_complex() or positions.dtype == torch.bool:
        raise ConfigError(f"positions: expected an integer dtype, got {positions.dtype}")
