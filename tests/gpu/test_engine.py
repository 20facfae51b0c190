"""The engine on the GPU. Catches: a copy that compute does not wait for, a staging cell that is overwritten while it
is read, new tokens that miss the host, a step that differs in one bit because its pages lie elsewhere, a wait that
crept into a step."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

from engine_cases import poison_staging
from gpu.engine_pair import Recorder, copy_by, delay_and_poison, live_kv, make, run, start, widen
from tidekv.engine.model import LoadedModel
from tidekv.memory.ledger import HIGH, LOW

LENGTHS = [300, 33, 700, 161]
COPIES = ["kernel", "copy engine"]


def assert_same_bits(got: list[torch.Tensor], want: list[torch.Tensor]) -> None:
    assert len(got) == len(want)
    for i, (mine, other) in enumerate(zip(got, want, strict=True)):
        assert not mine.isnan().any(), f"NaN in {i}: staging was read before its copy"
        assert torch.equal(mine, other), f"{i}: differs by up to {(mine.float() - other.float()).abs().max():g}"


@pytest.mark.parametrize("how", COPIES)
def test_halving_and_restore_change_no_bit(
    monkeypatch: pytest.MonkeyPatch, device: str, llama: tuple[LoadedModel, torch.dtype], how: str
) -> None:
    """Streams delayed at random, staging poisoned: logits of every step and KV of every layer equal ample memory's."""
    copy_by(monkeypatch, how, device)
    loaded, dtype = llama
    recorder = Recorder(monkeypatch)
    ample = make(loaded, device, dtype)
    ample_names = start(ample, LENGTHS, 40, high=(1,))
    run(ample, 24)
    want, want_kv = recorder.take(), live_kv(ample, ample_names)
    del ample

    engine = make(loaded, device, dtype)
    counts = delay_and_poison(engine, device)
    names = start(engine, LENGTHS, 40, high=(1,))
    allocator, levels = engine.allocator, []

    def halve(code: int) -> None:
        assert allocator._halve_and_repack(code, 0), allocator.refusals
        levels.append((code, int(allocator.ledger.level[code])))

    run(
        engine,
        24,
        before={
            5: lambda: halve(LOW),
            9: lambda: halve(LOW),
            12: lambda: halve(HIGH),
            16: lambda: widen(engine),
            20: lambda: halve(LOW),
        },
    )
    got = recorder.take()
    assert levels == [(LOW, 1), (LOW, 2), (HIGH, 1), (LOW, 1)]
    assert counts["copies"] > 50
    assert counts["poisoned"] > 0
    assert allocator.num_halvings[LOW] == 3
    assert engine.stats()["retractions"] == engine.stats()["parkings"] == 0
    assert_same_bits(got, want)
    assert_same_bits(live_kv(engine, names), want_kv)


@pytest.mark.parametrize("how", COPIES)
def test_prefill_into_narrow_slots(
    monkeypatch: pytest.MonkeyPatch, device: str, llama: tuple[LoadedModel, torch.dtype], how: str
) -> None:
    """Prompts that arrive while new slots are opened narrow: all their tokens pass through staging and to the host."""
    copy_by(monkeypatch, how, device)
    loaded, dtype = llama
    recorder = Recorder(monkeypatch)
    results = []
    for narrow in (False, True):
        engine = make(loaded, device, dtype, prefill_chunk=256)
        first = start(engine, [40], 30)
        run(engine, 3)
        if narrow:
            delay_and_poison(engine, device)
            assert engine.allocator._halve_and_repack(LOW, 0), engine.allocator.refusals
        later = start(engine, [500, 90], 30)
        run(engine, 8)
        results.append((recorder.take(), live_kv(engine, first + later)))
        if narrow:
            assert engine.allocator.low_current_slot_width < engine.geometry.layer_num
            assert engine.backend.host_bytes_out > 0
        del engine
    (want, want_kv), (got, got_kv) = results
    assert_same_bits(got, want)
    assert_same_bits(got_kv, want_kv)


@pytest.mark.parametrize("how", COPIES)
def test_context_in_parts(monkeypatch: pytest.MonkeyPatch, device: str, tiny: LoadedModel, how: str) -> None:
    """Staging for a few slots only: the context comes in parts, merged by log-sum-exp: close, and the same tokens."""
    copy_by(monkeypatch, how, device)
    recorder = Recorder(monkeypatch)
    outputs, logits = [], []
    for narrow in (False, True):
        options: dict[str, Any] = {"dynamic_max_pages": 2} if narrow else {}
        engine = make(tiny, device, torch.float32, **options)
        names = start(engine, [400], 20)
        run(engine, 4)
        parts = 0
        if narrow:
            counts = delay_and_poison(engine, device)
            assert engine.allocator._halve_and_repack(LOW, 0), engine.allocator.refusals
        while not engine.requests[names[0]].is_done:
            engine.step()
            engine.check()
        if narrow:
            # 26 slots through at most 8 pairs of cells: more copies than one for each non-resident layer and step.
            parts = counts["copies"] // (16 * engine.geometry.layer_num // 2)
            assert parts > 1
        outputs.append(engine.requests[names[0]].output_ids)
        logits.append(recorder.take())
    assert outputs[0] == outputs[1]
    for mine, want in zip(logits[1], logits[0], strict=True):
        torch.testing.assert_close(mine, want, rtol=1e-4, atol=1e-4 * float(want.abs().max()))


def test_write_through_halves_without_a_copy(
    monkeypatch: pytest.MonkeyPatch, device: str, llama: tuple[LoadedModel, torch.dtype]
) -> None:
    """What was written through is what halving would have copied, bit for bit."""
    loaded, dtype = llama
    recorder = Recorder(monkeypatch)
    results = []
    for through in (False, True):
        engine = make(loaded, device, dtype, write_through=through)
        names = start(engine, LENGTHS, 30)
        run(engine, 4)
        if through:
            before = engine.allocator.repacker.counters.to_host_bytes
            assert engine.allocator._halve_and_repack(LOW, 0), engine.allocator.refusals
            assert engine.allocator.repacker.counters.to_host_bytes == before
            delay_and_poison(engine, device)
        run(engine, 5)
        results.append((recorder.take(), live_kv(engine, names)))
        del engine
    assert_same_bits(results[1][0], results[0][0])
    assert_same_bits(results[1][1], results[0][1])


def test_graphs_follow_the_widths(on_gpu: bool, tiny: LoadedModel) -> None:
    """Replayed at full width, while something is narrow (from its second step on), and after restore; same tokens."""
    if not on_gpu:
        pytest.skip("CUDA graphs need a GPU")
    outputs = []
    for graphs in (False, True):
        engine = make(tiny, "cuda", torch.float32, graphs=graphs)
        names = start(engine, LENGTHS, 24)
        run(engine, 6)
        if graphs:
            counted: Any = engine.runner.graphs  # type: ignore[attr-defined]
            full = counted.replays
            assert full > 0
            assert engine.allocator._halve_and_repack(LOW, 0), engine.allocator.refusals
            run(engine, 6)
            assert counted.narrow_replays >= 4
            assert counted.eager_decodes <= 2
            assert poison_staging(engine) > 0
            run(engine, 2)
            widen(engine)
            full = counted.replays
            run(engine, 4)
            assert counted.replays == full + 4
        else:
            run(engine, 4)
            assert engine.allocator._halve_and_repack(LOW, 0), engine.allocator.refusals
        while any(not engine.requests[name].is_done for name in names):
            engine.step()
        outputs.append([engine.requests[name].output_ids for name in names])
    assert outputs[0] == outputs[1]


def test_running_ahead_of_the_tokens_gives_the_same(on_gpu: bool, tiny: LoadedModel) -> None:
    """Steps launched before the tokens of the last are read, replayed and launch by launch, under pressure as well."""
    device = "cuda" if on_gpu else "cpu"
    outputs = []
    for overlap in (False, True):
        for graphs in (False, on_gpu):
            engine = make(tiny, device, torch.float32, graphs=graphs, overlap=overlap)
            names = start(engine, LENGTHS, 24)
            run(engine, 9)
            assert engine.allocator._halve_and_repack(LOW, 0), engine.allocator.refusals
            run(engine, 3)
            widen(engine)
            while any(not engine.requests[name].is_done for name in names):
                engine.step()
            outputs.append([engine.requests[name].output_ids for name in names])
    assert outputs[1:] == outputs[:-1]


# ---- no wait ---------------------------------------------------------------------------------------------------------


def test_a_steady_decode_allocates_without_a_wait(on_gpu: bool, device: str, tiny: LoadedModel) -> None:
    """torch raises for a call that synchronises."""
    engine = make(tiny, device, torch.float32)
    allocator, batch = engine.allocator, 8
    for priorities in (True, False, [i % 2 == 0 for i in range(batch)]):
        found = allocator.alloc(batch * 16, True)
        assert found is not None
        last = found[0].view(batch, 16)[:, -1].contiguous()
        lens = torch.full((batch,), 33)
        lens_dev = lens.to(device)
        for attempt in range(2):  # the first one compiles kernels and uploads the mirror of the free list
            try:
                if on_gpu and attempt:
                    torch.cuda.synchronize()
                    torch.cuda.set_sync_debug_mode("error")
                ends = allocator.alloc_decode(lens_dev, lens, last, priorities)
            finally:
                if on_gpu:
                    torch.cuda.set_sync_debug_mode("default")
            assert ends is not None
            assert ends[1] is None
            allocator.free(ends[0])
        allocator.free(found[0])


@pytest.mark.parametrize("graphs", [True, False])
def test_a_steady_step_waits_once(on_gpu: bool, tiny: LoadedModel, graphs: bool) -> None:
    """The one wait of a step is for its tokens."""
    if not on_gpu:
        pytest.skip("waits are counted by CUDA's side of torch")
    engine = make(tiny, "cuda", torch.float32, graphs=graphs)
    start(engine, [40, 50, 60], 40)
    for _ in range(6):
        engine.step()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            engine.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    waits = [f"{w.filename}:{w.lineno}" for w in caught if "called a synchronizing CUDA operation" in str(w.message)]
    assert len(waits) <= 1, waits
