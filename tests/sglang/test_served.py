"""Real servers on a CPU: the demo's claims, a soak with aborts, and servers that must refuse to start."""

from __future__ import annotations

import re
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("sglang.srt")
pytest.importorskip("openai")

import demo
from model_folder import model_folder
from serving import command, environment, free_port, serve
from soak import clean_up, soak

TIDE = {"TIDEKV_SGLANG": "1", "TIDEKV_OVERCOMMIT": "3.0"}


@pytest.fixture(scope="module")
def model() -> Path:
    return model_folder()


@pytest.mark.timeout(1500)
def test_demo(model: Path, tmp_path: Path) -> None:
    """Stock retracts, tidekv does not, answers are the reference's; then widths come back and nothing has leaked."""
    asks = demo.workload()
    ample = demo.run("ample", asks, model, tmp_path, 16384)
    need = sum(a.prompt_tokens + a.completion_tokens for a in ample.answers)
    small = int(demo.SHARE * need) // demo.PAGE_SIZE * demo.PAGE_SIZE
    stock = demo.run("stock", asks, model, tmp_path, small)
    tide = demo.run("tidekv", asks, model, tmp_path, small, TIDE)
    print(demo.table([ample, stock, tide], asks, ample.answers))
    assert demo.judge(ample, stock, tide) == []
    assert tide.restores > 0
    log = (tmp_path / "tidekv.log").read_text()
    assert "Retract requests" not in log
    assert re.search(r"tidekv narrow\. width high: \d+, low: \d+, #narrow-page: [1-9]", log)

    window = TIDE | {"TIDEKV_LOW_READS": "window", "TIDEKV_WINDOW_TOKENS": "64"}
    shorter = [replace(ask, max_tokens=32) for ask in asks]  # greedy: a shorter answer is the beginning of the longer
    lossy = demo.run("window", shorter, model, tmp_path, small, window)
    assert lossy.retractions == 0
    assert "low reads: window of 64 tokens (LOSSY)" in (tmp_path / "window.log").read_text()
    for ask, got, want in zip(asks, lossy.answers, ample.answers, strict=True):
        assert got.completion_tokens > 0
        assert ask.priority == demo.LOW or want.text.startswith(got.text)  # high is exact, always
    assert lossy.window_pages > 0


@pytest.mark.timeout(1200)
def test_soak_leaves_everything_clean(model: Path, tmp_path: Path) -> None:
    with serve("soak", model, tmp_path, 1024, demo.PAGE_SIZE, TIDE) as server:
        tally = soak(server, 200, seed=11)
        assert tally.failed == []
        assert tally.aborted > 10
        assert tally.finished > 100
        clean_up(server)
        assert server.metric("tidekv:halvings_total") > 0
        assert server.metric("tidekv:host_pages_used") == 0
        assert server.metric("tidekv:narrow_slots") == 0
        assert server.metric("tidekv:virtual_pages_used") == 0
        assert server.metric("tidekv:free_pages") == 1024 // demo.PAGE_SIZE
        server.check_alive()
        log = server.log.read_text()
    assert "leak" not in log.lower()
    assert "Scheduler hit an exception" not in log


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("tide", "extra", "messages"),
    [
        (TIDE, ("--page-size", "1", "--enable-mixed-chunk"), ("set --page-size 16 or 64", "drop --enable-mixed-chunk")),
        (TIDE | {"TIDEKV_OVERCOMIT": "2"}, (), ("TIDEKV_OVERCOMIT means nothing",)),
    ],
    ids=["flags", "typo"],
)
def test_a_server_that_cannot_be_served_does_not_start(
    model: Path, tmp_path: Path, tide: dict[str, str], extra: tuple[str, ...], messages: tuple[str, ...]
) -> None:
    line = command(model, free_port(), 1024, demo.PAGE_SIZE, extra)
    done = subprocess.run(line, env=environment(tide), cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    for message in messages:
        assert message in done.stdout + done.stderr
