"""Real servers on a CPU: the demo's claims, a soak with aborts, and servers that must refuse to start."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("sglang.srt")
pytest.importorskip("openai")

import demo
from model_folder import model_folder
from serving import Ask, Server, command, environment, free_port, serve
from soak import clean_up, soak

# Newcomers are prefilled and then pause, up to a quarter of the pool: more comes and goes than with the default, none.
TIDE = {"TIDEKV_SGLANG": "1", "TIDEKV_OVERCOMMIT": "3.0", "TIDEKV_PAUSED_SHARE": "0.25"}


@pytest.fixture(scope="module")
def model() -> Path:
    return model_folder()


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("servers")


@pytest.fixture(scope="module")
def asks() -> list[Ask]:
    """The demo's requests with answers half as long: four servers have to give them."""
    return demo.workload(max_tokens=40)


@pytest.fixture(scope="module")
def ample(model: Path, logs: Path, asks: list[Ask]) -> demo.Outcome:
    """Stock SGLang with memory for everything: the reference."""
    return demo.run("ample", asks, model, logs, 16384)


@pytest.fixture(scope="module")
def stock(model: Path, logs: Path, asks: list[Ask], ample: demo.Outcome) -> demo.Outcome:
    """Stock SGLang in a pool of 40 % of the need."""
    return demo.run("stock", asks, model, logs, demo.small_pool(ample))


@pytest.fixture(scope="module")
def tide(model: Path, logs: Path, ample: demo.Outcome) -> Iterator[Server]:
    """tidekv in the same pool. It serves two tests: an SGLang server takes most of a minute to start."""
    with serve("tidekv", model, logs, demo.small_pool(ample), demo.PAGE_SIZE, TIDE) as server:
        yield server


@pytest.mark.timeout(1500)
def test_tidekv_narrows_where_stock_retracts(
    asks: list[Ask], ample: demo.Outcome, stock: demo.Outcome, tide: Server
) -> None:
    """What the demo claims: no retraction, the reference's answers; then widths come back."""
    got = demo.ask(tide, asks)
    print(demo.table([ample, stock, got], asks, ample.answers))
    assert demo.judge(ample, stock, got) == []
    # What narrowed came back: by the ladder, or with the request that had paused.
    assert got.restores + tide.metric("tidekv:resumes_total") > 0
    log = tide.log.read_text()
    assert "Retract requests" not in log
    assert re.search(r"tidekv narrow\. width high: \d+, low: \d+, #narrow-page: [1-9]", log)


@pytest.mark.timeout(1200)
def test_soak_leaves_everything_clean(tide: Server) -> None:
    """200 random requests with aborts. SGLang's leak check is on and strict; tidekv recounts its books at rest."""
    halvings = tide.metric("tidekv:halvings_total")
    tally = soak(tide, 200, seed=11)
    assert tally.failed == []
    assert tally.aborted > 10
    assert tally.finished > 100
    clean_up(tide)
    assert tide.metric("tidekv:halvings_total") > halvings
    assert tide.metric("tidekv:host_pages_used") == 0
    assert tide.metric("tidekv:narrow_slots") == 0
    assert tide.metric("tidekv:virtual_pages_used") == 0
    total = re.search(r"tidekv on\. #physical-token: (\d+)", tide.log.read_text())
    assert total is not None
    assert tide.metric("tidekv:free_pages") == int(total[1]) // demo.PAGE_SIZE
    tide.check_alive()
    log = tide.log.read_text()
    assert "leak" not in log.lower()
    assert "Scheduler hit an exception" not in log


@pytest.mark.timeout(900)
def test_a_window_changes_only_low_answers(model: Path, logs: Path, asks: list[Ask], ample: demo.Outcome) -> None:
    window = TIDE | {"TIDEKV_LOW_READS": "window", "TIDEKV_WINDOW_TOKENS": "64"}
    shorter = [replace(ask, max_tokens=20) for ask in asks]  # greedy: a shorter answer is the beginning of the longer
    lossy = demo.run("window", shorter, model, logs, demo.small_pool(ample), window)
    assert lossy.retractions == 0
    assert "low reads: window of 64 tokens (LOSSY)" in (logs / "window.log").read_text()
    for ask, got, want in zip(asks, lossy.answers, ample.answers, strict=True):
        assert got.completion_tokens > 0
        assert ask.priority == demo.LOW or want.text.startswith(got.text)  # high is exact, always
    assert lossy.window_pages > 0


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
