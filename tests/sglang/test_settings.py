"""Settings, capacity and refusals: plain functions, no SGLang."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tidekv.errors import ConfigError
from tidekv.sglang_plugin import refusals
from tidekv.sglang_plugin.capacity import default_host_pages, machine_memory_bytes, plan_capacity
from tidekv.sglang_plugin.config import Settings, is_switched_on, read_settings

FINE = {
    "disaggregation_mode": "null", "pp_size": 1, "kv_cache_dtype": "auto",
    "speculative_algorithm": None, "enable_mixed_chunk": False,
}  # fmt: skip


def test_settings_come_from_the_environment() -> None:
    assert read_settings({}) == Settings()
    found = read_settings({"TIDEKV_SGLANG": "1", "TIDEKV_OVERCOMMIT": "2.5", "TIDEKV_PRIORITY_THRESHOLD": "7"})
    assert found == Settings(priority_threshold=7, overcommit=2.5)


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("TIDEKV_OVERCOMMIT", "0.5", r"1\.0\.\.64\.0, got 0\.5"),
        ("TIDEKV_OVERCOMMIT", "lots", "must be float, got 'lots'"),
        ("TIDEKV_HOST_TOKENS", "-1", ">= 0"),
        ("TIDEKV_OVERCOMIT", "2", "TIDEKV_OVERCOMIT means nothing"),
    ],
)
def test_a_wrong_setting_is_named(variable: str, value: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_settings({variable: value})


def test_the_switch() -> None:
    assert [is_switched_on({"TIDEKV_SGLANG": v}) for v in ("1", "0", "")] == [True, False, False]
    assert not is_switched_on({})
    with pytest.raises(ConfigError, match="'yes'"):
        is_switched_on({"TIDEKV_SGLANG": "yes"})


def test_switched_off_imports_nothing_of_sglang() -> None:
    code = (
        "import sys; from tidekv.sglang_plugin.plugin import register; register(); "
        "sys.exit(any(name.startswith('sglang') for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], env={"TIDEKV_SGLANG": "0"}, check=False).returncode == 0


def test_an_error_of_the_plugin_ends_the_process() -> None:
    code = "from tidekv.sglang_plugin.plugin import register\ntry: register()\nexcept Exception: pass\nprint('stock')"
    done = subprocess.run(
        [sys.executable, "-c", code], env={"TIDEKV_SGLANG": "on"}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "TIDEKV_SGLANG must be 1" in done.stderr
    assert "stock" not in done.stdout


def test_capacity_is_bounded_by_widths_host_and_overcommit() -> None:
    # 30 layers: widths 30, 15, 7, 3, so 8 slots a page; staging of 100 pages: max(7, ceil(40 / 15)) = 7.
    assert plan_capacity(100, 30, 4, 40, 64.0).virtual_pages == (100 - 7) * 8 - 7
    assert plan_capacity(100, 30, 4, 40, 2.5).virtual_pages == 250
    assert plan_capacity(100, 30, 4, 40, 2.5, host_pages=120).virtual_pages == 120
    assert plan_capacity(100, 30, 4, 40, 2.5, host_pages=0).virtual_pages == 100
    # A step that writes more slots than staging can hold leaves nothing to overcommit.
    assert plan_capacity(100, 30, 4, 15 * 100, 8.0).virtual_pages == 100


def test_pinned_memory_is_a_share_of_the_container(tmp_path: Path) -> None:
    whole = machine_memory_bytes(tmp_path)
    assert whole > 2**28
    (tmp_path / "memory.max").write_text("max\n")
    assert machine_memory_bytes(tmp_path) == whole
    (tmp_path / "memory.max").write_text(f"{2**27}\n")
    assert machine_memory_bytes(tmp_path) == 2**27
    assert default_host_pages(2**20, 4, 2**27) == 8


def test_a_fine_configuration_is_served() -> None:
    assert refusals.refused_flags(SimpleNamespace(**FINE)) == []
    refusals.refuse([])


@pytest.mark.parametrize("flag", sorted(refusals.FLAGS))
def test_each_flag_is_refused_by_name(flag: str) -> None:
    bad = {"pp_size": 2, "dcp_size": 2, "disaggregation_mode": "prefill"}
    args = SimpleNamespace(**FINE | {flag: bad.get(flag, "fp8_e4m3" if flag == "kv_cache_dtype" else "on")})
    (reason,) = refusals.refused_flags(args)
    assert reason.startswith(f"{flag}=")
    with pytest.raises(ConfigError, match=flag):
        refusals.refuse([reason])


def test_overlap_on_a_gpu_can_be_switched_off() -> None:
    assert Settings().overlap
    assert not read_settings({"TIDEKV_OVERLAP": "0"}).overlap
    (reason,) = refusals.refused_overlap(True, "cuda", False)
    assert "TIDEKV_OVERLAP=0: add --disable-overlap-schedule" in reason
    for fine in ((False, "cuda", False), (True, "cuda:0", True), (True, "cpu", False)):
        assert refusals.refused_overlap(*fine) == []


@pytest.mark.parametrize("device", ["cuda", "cuda:1"])
def test_attention_backends_on_a_gpu(device: str) -> None:
    for name in ("triton", "flashinfer", "fa3"):
        assert refusals.refused_backends(name, name, device) == []
    (reason,) = refusals.refused_backends("trtllm_mha", "trtllm_mha", device)
    assert reason.startswith("attention backend 'trtllm_mha'")
    assert reason.endswith("set --attention-backend triton (or flashinfer; fa3 on Hopper)")
    (reason,) = refusals.refused_backends("fa3", "flashinfer", device)
    assert reason.startswith("prefills are read by fa3, decodes by flashinfer: drop --prefill-attention-backend")


def test_attention_backends_on_a_cpu() -> None:
    assert refusals.refused_backends("torch_native", "torch_native", "cpu") == []
    (reason,) = refusals.refused_backends("intel_amx", "intel_amx", "cpu")
    assert reason.endswith("set --attention-backend torch_native")


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"page_size": 1}, "--page-size"),
        ({"use_mla_backend": True}, "MLA"),
        ({"is_hybrid_swa": True}, "pool of their own"),
        ({"sliding_window_size": 1023}, "sliding-window"),
        ({"mambaish_config": object()}, "state-space"),
        ({"kv_cache_dtype": torch.float8_e4m3fn}, "--kv-cache-dtype"),
        ({"post_capture_kv_active": True}, "post-capture"),
    ],
)
def test_each_model_property_is_refused_by_name(change: dict[str, object], word: str) -> None:
    fine = {
        "page_size": 16, "use_mla_backend": False, "is_hybrid_swa": False, "is_draft_worker": False,
        "sliding_window_size": None,
        "kv_cache_dtype": torch.bfloat16, "model_config": SimpleNamespace(is_encoder_decoder=False),
        "layer_info": SimpleNamespace(num_effective_layers=32),
    }  # fmt: skip
    assert refusals.refused_model(SimpleNamespace(**fine)) == []
    (reason,) = refusals.refused_model(SimpleNamespace(**fine | change))
    assert word in reason
