"""What the engine knows of one request, and what it hands back at the end. Holds no KV and no locations."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from tidekv.engine.sampling import SamplingParams
from tidekv.errors import InvariantError

FinishReason = Literal["stop", "length", "abort"]


class RequestState(Enum):
    """WAITING -> PREFILL -> DECODE (-> ENDING) -> FINISHED. PAUSED and back when memory is short; ABORTED from
    anywhere."""

    WAITING = "waiting"  # owns no row and no pages; a retracted request comes back here
    PREFILL = "prefill"  # owns a row; some known tokens have no KV yet
    DECODE = "decode"  # one new token a step
    PAUSED = "paused"  # keeps its row and its KV, wherever that lies, but is not stepped
    ENDING = "ending"  # its last token has been sampled, and is on the device only; owns nothing any more
    FINISHED = "finished"  # stopped by itself; owns nothing any more
    ABORTED = "aborted"  # stopped by the caller; owns nothing any more


@dataclass(slots=True, eq=False)  # eq=False: two requests with equal tokens are still two; and hashable by identity
class Request:
    """One prompt on its way. Who sets a field is said beside it.

    The tokens, prompt then output, by what became of them (half-open):

        [0, num_shared_pages * page_size) KV found in the prefix cache | [.., num_computed) KV computed by us
        | [num_computed, num_tokens) known, but no KV yet: what the next steps compute
    """

    # engine, on arrival; never changed after
    id: str
    prompt_ids: list[int]
    sampling: SamplingParams
    is_high_priority: bool
    arrival_order: int  # 0, 1, 2, ..: ties between equals are broken by it, never by a clock
    arrival_s: float  # engine's monotonic clock, seconds, as all the times below

    # scheduler
    state: RequestState = RequestState.WAITING
    row: int = -1  # row of req_to_token; -1 = none
    num_computed: int = 0  # tokens whose KV is in the cache: admission sets the match, steps add, retraction zeroes
    num_shared_pages: int = 0  # leading pages matched at admission, so not computed by us
    # [N] node ids of the path that we hold locked in the prefix cache
    prefix_nodes: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    # [pages in the row] True: ours to free. False: the prefix cache's, matched at admission or adopted by it later
    owned_pages: NDArray[np.bool_] = field(default_factory=lambda: np.empty(0, np.bool_))
    # [pages we own] host pages while we are parked there whole, else None
    parked: NDArray[np.int64] | None = None
    away_cells: int = 0  # cells of our pages that are not on the device, when last counted; 0 = full width
    due_pages: int = 0  # narrow pages that its read mode reads in full, when last counted (a window: the recent ones)
    is_lossy: bool = False  # computed with old pages left out (a window): its KV is never shared with others
    turn_end: int = 0  # output tokens up to which nobody of its class takes its place, once it was overdue and came in
    lost_tokens: int = 0  # retraction: tokens that had KV; admission counts those it does not find in the prefix cache
    last_step: int = -1  # number of the last step that ran it, -1 = none; rotation takes the longest untouched first
    stuck_at: int = -1  # num_computed when, alone in the pool, it found no room and was begun anew; -1 = never
    times_retracted: int = 0  # lost its KV and went back to WAITING
    times_paused: int = 0
    recomputed_tokens: int = 0  # tokens whose KV was computed once more, after a retraction

    # engine, after each step
    output_ids: list[int] = field(default_factory=list)
    num_unread: int = 0  # 1: one more token has been sampled, and is on the device only (the engine runs ahead)
    token_times_s: list[float] = field(default_factory=list)  # one for each of output_ids
    first_token_s: float | None = None
    finish_s: float | None = None  # when it finished or was aborted
    finish_reason: FinishReason | None = None  # set together with FINISHED ("stop", "length") or ABORTED ("abort")

    @property
    def num_tokens(self) -> int:
        """Prompt and output, a token that only the device knows yet counted in."""
        return len(self.prompt_ids) + len(self.output_ids) + self.num_unread

    @property
    def is_done(self) -> bool:
        """Finished or aborted: never scheduled again."""
        return self.state in (RequestState.FINISHED, RequestState.ABORTED)

    def all_tokens(self) -> list[int]:
        """Prompt and output, as far as they have been read, in one new list, O(num_tokens)."""
        return self.prompt_ids + self.output_ids


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """What the caller gets. Times in seconds, None where the request ended before there was one."""

    id: str
    token_ids: list[int]  # generated tokens only
    text: str | None  # None: the model has no tokenizer
    finish_reason: FinishReason
    ttft_s: float | None  # arrival to first token
    per_token_s: float | None  # mean gap between tokens after the first; None with fewer than 2
    e2e_s: float  # arrival to end
    recomputed_tokens: int
    times_retracted: int

    @classmethod
    def of(cls, request: Request, text: str | None) -> RequestOutput:
        """The output of a request that is done. Raises InvariantError if it is not."""
        if request.finish_reason is None or request.finish_s is None:
            raise InvariantError(f"request {request.id} has not ended: state {request.state.value}")
        times, first = request.token_times_s, request.first_token_s
        return cls(
            id=request.id,
            token_ids=list(request.output_ids),
            text=text,
            finish_reason=request.finish_reason,
            ttft_s=None if first is None else first - request.arrival_s,
            per_token_s=(times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else None,
            e2e_s=request.finish_s - request.arrival_s,
            recomputed_tokens=request.recomputed_tokens,
            times_retracted=request.times_retracted,
        )
