"""What streaming, restoring and admission cost, and what the scheduler may spend on them. Pure functions of counts and
configured rates: no clock, no event, so that every tensor-parallel rank decides alike.

A narrowed slot costs its non-resident bytes over the link at **every** step that reads it; widening it costs them once.

    step_s          = base_s + batch * request_s + context * context_s + prompt * prompt_s
    stream_budget   = link_rate * step_s * STREAM_SHARE    copies run under a step: nobody waits. First what high
                                                           priority reads, then pages of paused requests that come in
                                                           for good (they are not in that step), then streaming
    move_budget     = link_rate * step_s * share           other widening runs between steps: on average a step takes
                                                           `share` longer while high priority decodes
    saved           = link_rate * share * BACKLOG_S        of the move budget that may be kept for later
    burst           = link_rate * (chunk * prompt_s - step_s)   of what was saved that one step may take: then it is as
                                                           long as a step with a chunk of a prompt, and has none
    quantum         = bring_in_bytes / (link_rate * step_s * QUANTUM_COST)    steps; then bringing in was 5 % at most
    may owe         = backlog + own <= saved               else a prompt that would open narrow waits
    paused pages    <= PAUSED_SHARE of the pool            likewise
    restore pays if   bring_in_bytes < steps_left * streamed_bytes_a_step
    a chunk hides     if unhidden_link = 0 and narrow_chunk_s <= share * chunk * prompt_s; else a prompt is opened
                      narrow in its last chunk only, and nobody who is paused is streamed under it
    streaming under a prompt's chunk, where the chunk does not hide it, pays if
                      unhidden_link * its bytes * steps_left <= bring_in_bytes
    narrowing pays if serial_step_s <= share * base_s      every step, high priority's too, takes `serial_step_s` longer
                                                           while anything is narrow; else requests move whole, as in
                                                           swapping

Example, H200 and Llama-3.1-8B (131,072 bytes a token, 55 GB/s): a low request of 4,096 tokens at 2 of 32 layers streams
503 MB at every step, 9.2 ms of the link, while its step takes 6 ms; widening it takes the same 9.2 ms once. A prefill
step of 2,048 tokens takes 50 ms and hides 2.2 GB of streaming. Under steps widening goes at 335,000 tokens/s; between
them, at a share of 5 %, at 21,000, and the 9.2 ms of bringing the request in pay after 31 steps.

Source of the formulas: rates as measured on a H200 (pinned host to device 55 GB/s, device copy 4.2 TB/s); overlap and
its absence are what the code does: `Streamer` and `CopiesBehind` copy on streams of their own, `Repacker` on the
compute stream.
"""

from __future__ import annotations

from dataclasses import dataclass

from tidekv.errors import ConfigError

STREAM_SHARE = 0.8  # of the link's bytes in a step: the rest is for what the rates do not know
QUANTUM_COST = 0.05  # of its steps' time is what bringing a request in may cost
MIN_QUANTUM = 256  # tokens; two in three chat answers end within one quantum (Azure 2023: median 139, p90 428)
WIDEN_BATCH = 16  # pages widened at a time: 126 MB and 2.3 ms of Llama-3.1-8B in pages of 64, a remap of all tables
# Seconds of widening that may be owed to paused requests before no more prompts are opened narrow. With 4 s first
# tokens come sooner and all else later: low e2e P50 6.8 instead of 6.2 s, longest gap P99 13.6 instead of 6.8 s (Azure
# conversations from t = 1,250 s, 2 documents/s, a third of the peak; TTFT P50 0.4 instead of 1.4 s, swapping 10).
BACKLOG_S = 1.0
PAUSED_SHARE = 0.125  # of the pool's pages may hold those who are paused, at minimum width: others could run in them
LOW_ONLY_SHARE = 0.5  # of a step's time for widening when nobody of high priority decodes


@dataclass(frozen=True)
class StepRates:
    """Configured rates, seconds and bytes a second. The same on every rank."""

    link_rate: float = 55e9
    base_s: float = 4.7e-3
    request_s: float = 1.0e-5
    context_s: float = 3.1e-8
    prompt_s: float = 2.4e-5
    narrow_step_s: float = 0.0  # a step that streams takes so much longer, whatever it streams: the host's part
    narrow_chunk_s: float = 0.0  # likewise if it has a prompt's chunk, in place of `narrow_step_s`
    behind_step_s: float = 0.0  # likewise a step that pages come in under
    unhidden_link: float = 0.0  # share of the link's time that streaming adds to a step with a prompt's chunk
    serial_step_s: float = 0.0  # any step takes so much longer while anything is narrow: it is not launched ahead

    def __post_init__(self) -> None:
        for name in ("link_rate", "base_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} must be above 0, got {getattr(self, name)}")


def step_s(rates: StepRates, batch: int, context_tokens: int, prompt_tokens: int) -> float:
    """Seconds of a step without any bytes over the link."""
    return (
        rates.base_s
        + batch * rates.request_s
        + context_tokens * rates.context_s
        + max(0.0, prompt_tokens * rates.prompt_s - rates.base_s * (prompt_tokens > 0))
    )


def stream_budget_bytes(rates: StepRates, seconds: float) -> int:
    """Bytes that a step of this length hides."""
    return int(rates.link_rate * seconds * STREAM_SHARE)


def narrowing_pays(rates: StepRates, high_share: float) -> bool:
    """Steps of high priority are not lengthened by more than the stated share only because something is narrow."""
    return rates.serial_step_s <= high_share * rates.base_s


def owed_bytes(rates: StepRates, seconds: float) -> int:
    """What a step that takes so much longer, for streaming or for pages that come in, costs of the move budget."""
    return int(rates.link_rate * seconds)


def move_budget_bytes(rates: StepRates, seconds: float, high_share: float, high_decodes: bool) -> int:
    """Bytes that a step of this length earns for widening. `high_share`: how much longer high priority may wait."""
    return int(rates.link_rate * seconds * (high_share if high_decodes else LOW_ONLY_SHARE))


def saved_bytes(rates: StepRates, high_share: float) -> int:
    """Bytes of the move budget that may be saved up for later."""
    return int(rates.link_rate * high_share * BACKLOG_S)


def burst_bytes(rates: StepRates, seconds: float, chunk_tokens: int) -> int:
    """Bytes of what was saved up that one step of this length may take: then it is as long as a step with
    `chunk_tokens` of a prompt, which high priority waits for anyhow. A step that has such a chunk takes none."""
    return int(rates.link_rate * max(0.0, chunk_tokens * rates.prompt_s - seconds))


def quantum_tokens(rates: StepRates, bring_in_bytes: int, seconds: float) -> int:
    """Steps that a request runs once it was brought in, before another may take its place."""
    return max(MIN_QUANTUM, int(bring_in_bytes / (rates.link_rate * seconds * QUANTUM_COST)))


def restore_pays(bring_in_bytes: int, streamed_bytes_a_step: int, steps_left: int) -> bool:
    """Widening once is cheaper than streaming at each of the steps that are left."""
    return bring_in_bytes < steps_left * streamed_bytes_a_step


def rank_key(is_high: bool, overdue: bool, arrival_order: int) -> tuple[bool, bool, int]:
    """Who gets memory first, smallest first: high; then who has waited too long; then order of arrival."""
    return (not is_high, not overdue, arrival_order)


def pages_to_narrow(missing: int) -> int:
    """Pages to narrow so that `missing` become free: a narrow page keeps a part of itself and needs staging. At least a
    batch, since each narrowing rewrites the tables of locations once."""
    return max(WIDEN_BATCH, missing + missing // 8 + 2)


def chunk_hides(rates: StepRates, chunk_tokens: int, high_share: float) -> bool:
    """What is streamed under a chunk of so many prompt tokens does not lengthen its step by more than the stated
    share."""
    return rates.unhidden_link == 0 and rates.narrow_chunk_s <= high_share * chunk_tokens * rates.prompt_s


def narrow_prefill_tokens(rates: StepRates, away_bytes_a_token: int, chunk_tokens: int, high_share: float) -> int:
    """Context that a chunk of so many prompt tokens can stream without lengthening its step: none where streaming is
    not hidden by a chunk.

    A prompt may be opened narrow up to here; what follows has to be opened wide.
    """
    if not chunk_hides(rates, chunk_tokens, high_share):
        return 0
    hidden = stream_budget_bytes(rates, max(rates.base_s, chunk_tokens * rates.prompt_s))
    return hidden // max(1, away_bytes_a_token)


def may_owe(rates: StepRates, high_share: float, backlog_bytes: int, own_bytes: int) -> bool:
    """A prompt may be opened narrow: the last of those who are paused has its width back within `BACKLOG_S` all the
    same. The first one always may."""
    return not backlog_bytes or backlog_bytes + own_bytes <= saved_bytes(rates, high_share)
