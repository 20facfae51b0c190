"""Real servers on a CPU: the demo's claims, a soak with aborts, two tensor-parallel ranks, and servers that must refuse
to start."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("sglang.srt")
pytest.importorskip("openai")

import demo
from model_folder import model_folder
from serving import Ask, Server, command, environment, free_port, serve, stop
from soak import clean_up, post, soak

from tidekv.sglang_plugin.metrics import COUNTERS, GAUGES

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
def small(asks: list[Ask], model: Path) -> int:
    return demo.small_pool(asks, model)


@pytest.fixture(scope="module")
def outcomes(model: Path, logs: Path, asks: list[Ask], small: int) -> Iterator[tuple[list[demo.Outcome], Server]]:
    """What the demo's three servers did, and tidekv's, which goes on. Started and asked at one time: a start is most of
    a minute of one core's work, and an answer uses little more than one."""
    settings = (
        ("ample", demo.AMPLE_POOL, 1, None),  # stock, with memory for everything: the reference
        ("stock", small, 1, None),  # stock, in a pool of 40 % of the need
        ("tidekv", small, demo.PAGE_SIZE, TIDE),
    )
    ports: list[int] = []
    with ExitStack() as running, ThreadPoolExecutor(len(settings)) as threads:

        def start(name: str, pool: int, page_size: int, tide: dict[str, str] | None, port: int) -> Server:
            return running.enter_context(serve(name, model, logs, pool, page_size, tide, port=port))

        for _ in settings:
            ports.append(free_port(ports))
        servers = list(threads.map(start, *zip(*settings, strict=True), ports))
        done = list(threads.map(lambda server: demo.ask(server, asks), servers))
        for server in servers[:2]:
            stop(server.process)
        yield done, servers[2]


@pytest.fixture(scope="module")
def ample(outcomes: tuple[list[demo.Outcome], Server]) -> demo.Outcome:
    return outcomes[0][0]


@pytest.fixture(scope="module")
def tide(outcomes: tuple[list[demo.Outcome], Server]) -> Server:
    """tidekv's server, which has answered the demo's requests. It serves two tests."""
    return outcomes[1]


@pytest.mark.timeout(1500)
def test_tidekv_narrows_where_stock_retracts(
    asks: list[Ask], outcomes: tuple[list[demo.Outcome], Server], tide: Server
) -> None:
    """What the demo claims: no retraction, the reference's answers; then widths come back."""
    ample, stock, got = outcomes[0]
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
def test_a_window_changes_only_low_answers(
    model: Path, logs: Path, asks: list[Ask], ample: demo.Outcome, small: int
) -> None:
    window = TIDE | {"TIDEKV_LOW_READS": "window", "TIDEKV_WINDOW_TOKENS": "64"}
    shorter = [replace(ask, max_tokens=20) for ask in asks]  # greedy: a shorter answer is the beginning of the longer
    lossy = demo.run("window", shorter, model, logs, small, window)
    assert lossy.retractions == 0
    assert "low reads: window of 64 tokens (LOSSY)" in (logs / "window.log").read_text()
    for ask, got, want in zip(asks, lossy.answers, ample.answers, strict=True):
        assert got.completion_tokens > 0
        assert ask.priority == demo.LOW or want.text.startswith(got.text)  # high is exact, always
    assert lossy.window_pages > 0


def write_tiny_llama(folder: Path) -> None:
    """8 layers, two KV heads (one for each of two ranks), and weights large enough that every key matters."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(
        vocab_size=512, hidden_size=64, intermediate_size=96, num_hidden_layers=8, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, initializer_range=0.25, tie_word_embeddings=False,
    )).save_pretrained(folder)  # fmt: skip


def ask_with_ids(server: Server, num_requests: int, prompt: int, output: int) -> list[list[int]]:
    """Greedy answers to prompts of token ids, every third one of high priority."""

    def one(index: int) -> list[int]:
        body = {
            "input_ids": [(7 * index + 3 * i + i * i) % 500 for i in range(prompt)],
            "sampling_params": {"temperature": 0, "max_new_tokens": output, "ignore_eos": True},
            "priority": demo.HIGH if index % 3 == 0 else demo.LOW,
        }
        ids: list[int] = post(server, "/generate", body)["output_ids"]
        return ids

    with ThreadPoolExecutor(num_requests) as pool:
        return list(pool.map(one, range(num_requests)))


@pytest.mark.timeout(900)
def test_tensor_parallel_ranks_decide_alike(logs: Path, tmp_path: Path) -> None:
    """Two ranks under pressure give one rank's answers; each of them pauses, narrows and copies as much as the other,
    and its books are clean. Would catch: a decision that depends on a clock, an event or a rank's own memory."""
    write_tiny_llama(tmp_path)
    tide = TIDE | {"TIDEKV_QUANTUM": "2", "TIDEKV_TURN_TOKENS": "8"}
    extra = ("--skip-tokenizer-init", "--enable-metrics-for-all-schedulers")
    with serve("one-rank", tmp_path, logs, 512, 16, tide, extra) as server:
        wanted = ask_with_ids(server, 16, 64, 48)
        assert server.metric("tidekv:pauses_total") > 0
    cores = sorted(os.sched_getaffinity(0))
    # SGLang gives each rank a NUMA node of its own, or the cores that it is told: a small machine has one node.
    tide["SGLANG_CPU_OMP_THREADS_BIND"] = f"{cores[0]}|{cores[-1]}"
    with serve("two-ranks", tmp_path, logs, 512, 16, tide, ("--tp-size", "2", *extra)) as server:
        assert ask_with_ids(server, 16, 64, 48) == wanted
        clean_up(server)
        ranks = [
            {name: server.metric(f"tidekv:{name}", tp_rank=str(rank)) for name in (*COUNTERS, *GAUGES)}
            for rank in range(2)
        ]
    assert ranks[0] == ranks[1]
    for name in ("pauses_total", "halvings_total", "bytes_to_host_total", "bytes_from_host_total"):
        assert ranks[0][name] > 0, name
    for name in ("narrow_slots", "virtual_pages_used", "host_pages_used", "paused_requests"):
        assert ranks[0][name] == 0, name
    assert ranks[0]["free_pages"] == 512 // 16
    log = server.log.read_text()
    # The line comes after the recount, which raises if anything is off.
    assert {"TP0", "TP1"} <= set(re.findall(r"(TP\d)\] tidekv idle\. ", log))


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
