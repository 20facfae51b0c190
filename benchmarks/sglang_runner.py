"""One model runner of SGLang in this process, with the plugin's hooks and without a server or a scheduler: for
`tests/sglang/one_runner.py` and `benchmarks/sglang_steps.py`. It needs SGLang on the path and TIDEKV_SGLANG=1."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

BACKENDS = ("triton", "flashinfer", "fa3")  # those with a list of what they read; torch_native has none


def make_runner(model_path: str, **options: Any) -> Any:
    """As `sglang.benchmark.one_batch` makes it. options: arguments of the server."""
    from sglang.benchmark import one_batch
    from sglang.srt.server_args import PortArgs, ServerArgs

    from tidekv.sglang_plugin import plugin
    from tidekv.sglang_plugin.config import read_settings

    plugin.install(read_settings())
    args = ServerArgs(
        model_path=model_path, skip_tokenizer_init=True, log_level="error", disable_overlap_schedule=True,
        enable_priority_scheduling=True, default_priority_value=0, **options,
    )  # fmt: skip
    if hasattr(args, "resolve_once"):  # 0.5.20: arguments are resolved and published by whoever starts a process
        from sglang.srt import runtime_context

        args.resolve_once()
        ranks: dict[str, Any] = {}
        if hasattr(one_batch, "SpawnRanks"):  # 0.5.23: and who it is among its ranks
            world_rank = one_batch.spawn_world_rank(args, tp_rank=0, pp_rank=0)
            ranks["ranks"] = one_batch.SpawnRanks(world_rank=world_rank, gpu_id=0)
        runtime_context.publish(args, role="scheduler", **ranks)
    one_batch.get_tokenizer = lambda *a, **k: None
    wrapped, _ = one_batch.load_model(args, PortArgs.init_new(args), 0, 0)
    return wrapped.torch_runner


def make_request(index: int, prompt: Sequence[int], max_new_tokens: int, priority: int) -> Any:
    """A request that a runner can extend with all of `prompt`: greedy, and no text ends it."""
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.sampling.sampling_params import SamplingParams

    sampling = SamplingParams(temperature=0, max_new_tokens=max_new_tokens, ignore_eos=True)
    req = Req(str(index), "", array("q", prompt), sampling)
    req.priority = priority
    req.full_untruncated_fill_ids = req.origin_input_ids
    req.logprob_start_len = -1
    set_range(req, 0, len(prompt))
    return req


def set_range(req: Any, begin: int, end: int, req_to_token: Any = None) -> None:
    """The runner extends the request by its tokens [begin, end); those before are in its row of `req_to_token`."""
    if not hasattr(req, "set_extend_range"):  # 0.5.23
        req.prefix_len, req.extend_end = begin, end
        return
    if begin:
        req.prefix_indices = req_to_token[row_of(req), :begin].to(req.prefix_indices.dtype)
    req.set_extend_range(begin, end)


def row_of(req: Any) -> int | None:
    """The request's row of `req_to_token`."""
    from tidekv.sglang_plugin import page_mirror

    return page_mirror.row_of(req)
