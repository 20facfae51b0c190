"""Two batches out of SGLang's running batch, and one again: some requests lie aside while the others decode."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Container
from typing import Any


def take_aside(batch: Any, out: Container[Any]) -> Any:
    """Requests in `out` leave `batch` for a ScheduleBatch of their own, which is returned; None if that would be nobody
    or everybody, and nothing changed."""
    chosen = [i for i, req in enumerate(batch.reqs) if req in out]
    if not chosen or len(chosen) == len(batch.reqs):
        return None
    aside = copy.copy(batch)
    aside.sampling_info = _copy_sampling_info(batch.sampling_info, aside)
    aside.filter_batch(keep_indices=chosen)
    batch.filter_batch(keep_indices=[i for i, req in enumerate(batch.reqs) if req not in out])
    return aside


def put_together(running: Any, aside: Any) -> Any:
    """Everybody in one batch: `running`, or `aside` if nobody else is left."""
    aside.filter_batch()
    if aside.is_empty():
        return running
    if running is None or running.is_empty():
        aside.batch_is_full = False
        return aside
    running.merge_batch(aside)
    return running


def _copy_sampling_info(info: Any, batch: Any) -> Any:
    """A copy that filters on its own. Tensors are shared: SGLang replaces them and never writes into them."""
    out = copy.copy(info)
    orchestrator = info.penalizer_orchestrator
    if orchestrator is not None:
        mine = copy.copy(orchestrator)
        mine.batch = batch
        mine.penalizers = {}
        for kind, penalizer in orchestrator.penalizers.items():
            mine.penalizers[kind] = its = copy.copy(penalizer)
            its._orchestrator_ref = weakref.ref(mine)
        out.penalizer_orchestrator = mine
    return out
