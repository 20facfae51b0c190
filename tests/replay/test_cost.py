"""The cost model. Catches constants that no longer give the measured steps, and overlap where there is none."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tidekv.engine import streaming_policy as policy
from tidekv.errors import ConfigError
from tidekv.replay.cost import MEASURED_BATCH, MEASURED_CONTEXT, MEASURED_DECODE_S, StepLoad, cost_model


@pytest.mark.parametrize("index", range(len(MEASURED_BATCH)))
def test_the_measured_decode_steps_come_out(index: int) -> None:
    cost = cost_model("H200", "llama-3.1-8b")
    load = StepLoad(decode_batch=MEASURED_BATCH[index], decode_context=MEASURED_CONTEXT[index])
    assert cost.compute_s(load) == pytest.approx(MEASURED_DECODE_S[index])


@pytest.mark.parametrize(
    ("machine", "load", "measured_s"),
    [
        # 1,088 tokens each, benchmarks.engine; launched ahead
        ("H200-host", StepLoad(32, 32 * 1088), 5.95e-3),
        ("H200-host", StepLoad(32, 32 * 1088, streamed_bytes=285_000_000, any_narrow=True), 6.94e-3),
        ("H200-host", StepLoad(32, 32 * 1088, streamed_bytes=1_141_000_000, any_narrow=True), 23.5e-3),
        ("H200-host", StepLoad(128, 128 * 1088, streamed_bytes=1_141_000_000, any_narrow=True), 23.6e-3),
        ("H200-host", StepLoad(128, 128 * 1088, streamed_bytes=4_563_000_000, any_narrow=True), 91.9e-3),
        # a prompt's chunk beside 24 of 1,024 tokens, benchmarks.prompt_steps: alone, and with what 16 of them stream
        ("H200-host", StepLoad(24, 26_400, 2048, 2048 * 7168), 69.3e-3),
        ("H200-host", StepLoad(24, 26_400, 2048, 2048 * 7168, streamed_bytes=1_208_000_000, any_narrow=True), 70.0e-3),
        ("H200-host", StepLoad(24, 26_400, 1024, 1024 * 3584), 31.8e-3),
        ("H200-host", StepLoad(24, 26_400, 1024, 1024 * 3584, streamed_bytes=1_141_000_000, any_narrow=True), 33.5e-3),
        # of the validation's steps; not launched ahead while anything is narrow
        ("H200-serial", StepLoad(13, 16_397, any_narrow=True), 8.21e-3),
        ("H200-serial", StepLoad(11, 18_139, streamed_bytes=126_000_000, any_narrow=True), 10.96e-3),
        ("H200-serial", StepLoad(15, 16_000, behind_bytes=228_000_000, any_narrow=True), 9.6e-3),
        ("H200-serial", StepLoad(14, 20_000, 975, 561_720), 32.4e-3),
        ("H200-serial", StepLoad(15, 26_000, 2048, 2048 * 1500), 54.6e-3),
        ("H200-serial", StepLoad(8, 16_000, 2048, 2048 * 1500, streamed_bytes=935_000_000, any_narrow=True), 76.3e-3),
        (
            "H200-serial",
            StepLoad(17, 28_000, 2048, 2048 * 1500, streamed_bytes=1_413_000_000, any_narrow=True),
            82.3e-3,
        ),
        (
            "H200-serial",
            StepLoad(20, 28_000, 2048, 2048 * 1500, streamed_bytes=2_310_000_000, any_narrow=True),
            95.9e-3,
        ),
    ],
)
def test_steps_of_an_engine_on_a_gpu_come_out_within_a_fifth(machine: str, load: StepLoad, measured_s: float) -> None:
    assert cost_model(machine, "llama-3.1-8b").step_s(load) == pytest.approx(measured_s, rel=0.2)


def test_prefill_streams_hide_and_moves_add() -> None:
    cost = cost_model("H200", "llama-3.1-8b")
    load = StepLoad(decode_batch=8, decode_context=8_000, prefill_tokens=2048, prefill_context_sum=2048 * 1024)
    assert 2048 / 46_000 < cost.compute_s(load) < 1.3 * 2048 / 46_000
    hidden = StepLoad(**{**vars(load), "streamed_bytes": 2_000_000_000})  # 36 ms of the link under 50 ms of compute
    assert cost.step_s(hidden) == cost.step_s(load)
    bound = StepLoad(**{**vars(load), "streamed_bytes": 5_500_000_000})
    assert cost.step_s(bound) == pytest.approx(0.1)
    moved = StepLoad(**{**vars(load), "from_host_bytes": 550_000_000})
    assert cost.step_s(moved) == pytest.approx(cost.step_s(load) + 0.01)


def test_the_hosts_part_is_in_its_own_preset() -> None:
    device, host = cost_model("H200", "llama-3.1-8b"), cost_model("H200-host", "llama-3.1-8b")
    decode = StepLoad(decode_batch=8, decode_context=8_000)
    assert host.step_s(decode) == device.step_s(decode)
    small = StepLoad(8, 8_000, prefill_tokens=64, prefill_context_sum=64 * 65 // 2)
    assert (host.step_s(small), device.step_s(small) < 10e-3) == (20e-3, True)
    streaming = StepLoad(8, 8_000, streamed_bytes=1_000_000, behind_bytes=1_000_000, any_narrow=True)
    assert host.step_s(streaming) == pytest.approx(device.step_s(streaming) + 0.5e-3 + 0.3e-3)
    chunk = replace(small, streamed_bytes=1_000_000)
    assert host.step_s(chunk) == pytest.approx(20e-3 + 5e-3)  # the host's part of a chunk that streams
    serial = cost_model("H200-serial", "llama-3.1-8b")
    assert serial.step_s(streaming) == pytest.approx(device.step_s(streaming) + 2.5e-3 + 2.7e-3 + 1.5e-3)
    whole = StepLoad(prefill_tokens=2048, prefill_context_sum=2048 * 1024)
    assert host.step_s(whole) == device.step_s(whole)


def test_every_preset_is_usable_and_unknown_names_are_listed() -> None:
    for machine in ("H200", "H200-host", "H200-serial", "H100"):
        for model in ("llama-3.1-8b", "qwen3-8b", "llama-3.1-70b"):
            assert 1e-3 < cost_model(machine, model).decode_s(1, 1024) < 50e-3
    with pytest.raises(ConfigError, match="H200, H100, H200-host"):
        cost_model("A100", "llama-3.1-8b")
    with pytest.raises(ConfigError, match="qwen3-8b"):
        cost_model("H200", "gpt-2")


def test_the_schedulers_lines_are_close_to_the_cost_model() -> None:
    cost = cost_model("H200", "llama-3.1-8b")
    rates = cost.step_rates()
    for batch, context in ((1, 1024), (32, 32_768), (128, 131_072)):
        planned = policy.step_s(rates, batch, context, 0)
        assert planned == pytest.approx(cost.decode_s(batch, context), rel=0.25)


def test_policy_formulas_by_hand() -> None:
    rates = policy.StepRates(link_rate=50e9, base_s=0.005, request_s=0.0, context_s=0.0, prompt_s=2.5e-5)
    assert policy.step_s(rates, 10, 10_000, 0) == 0.005
    assert policy.step_s(rates, 10, 10_000, 2000) == pytest.approx(0.05)
    assert policy.stream_budget_bytes(rates, 0.01) == 400_000_000
    assert policy.move_budget_bytes(rates, 0.01, 0.05, high_decodes=True) == 25_000_000
    assert policy.move_budget_bytes(rates, 0.01, 0.05, high_decodes=False) == 250_000_000
    assert policy.quantum_tokens(rates, 500_000_000, 0.005) == policy.MIN_QUANTUM  # 40 steps pay for it
    assert policy.quantum_tokens(rates, 5_000_000_000, 0.005) == 400
    assert policy.restore_pays(100, 100, 2)
    assert not policy.restore_pays(100, 100, 1)
    assert policy.narrow_prefill_tokens(rates, 100_000, 2000, 0.05) == 20_000
    assert policy.chunk_hides(replace(rates, narrow_chunk_s=0.05 * 2000 * rates.prompt_s), 2000, 0.05)
    for costly in (replace(rates, narrow_chunk_s=5e-3), replace(rates, unhidden_link=0.1)):
        assert not policy.chunk_hides(costly, 2000, 0.05)
        assert policy.narrow_prefill_tokens(costly, 100_000, 2000, 0.05) == 0
    assert policy.rank_key(True, False, 9) < policy.rank_key(False, True, 1) < policy.rank_key(False, False, 0)
    assert [policy.pages_to_narrow(missing) for missing in (1, 80)] == [policy.WIDEN_BATCH, 92]
    assert policy.saved_bytes(rates, 0.05) == 2_500_000_000  # 1 s of the link at 5 %
    assert policy.burst_bytes(rates, 0.01, 2000) == 2_000_000_000  # 40 ms: what a chunk takes longer than this step
    assert policy.burst_bytes(rates, 0.01, 0) == 0
    assert policy.may_owe(rates, 0.05, 0, 20_000_000_000)  # the first one always may
    assert not policy.may_owe(rates, 0.05, 1, 10_000_000_000)
    assert policy.owed_bytes(policy.StepRates(link_rate=50e9), 0.006) == 300_000_000
    assert policy.narrowing_pays(policy.StepRates(base_s=5e-3, serial_step_s=0.25e-3), 0.05)
    assert not policy.narrowing_pays(policy.StepRates(base_s=5e-3, serial_step_s=0.26e-3), 0.05)
    with pytest.raises(ConfigError, match="link_rate"):
        policy.StepRates(link_rate=0.0)
