"""SGLang servers for tests and the demo: started as a user starts them, asked through the OpenAI API, ended by pid."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

START_SECONDS = 400  # 45 s on two idle cores; a busy machine takes several times that
MAX_RUNNING = 16


@dataclass(frozen=True)
class Ask:
    """One request of a workload. `priority`: SGLang's; 10 is high here, 0 low."""

    prompt: str
    max_tokens: int
    priority: int = 0


@dataclass(frozen=True)
class Answer:
    """text; seconds from sending to the end; tokens of prompt and answer."""

    text: str
    seconds: float
    prompt_tokens: int
    completion_tokens: int


@dataclass
class Server:
    """A running server. `log` is its whole output."""

    port: int
    process: subprocess.Popen[bytes]
    log: Path
    name: str = ""
    _models: list[str] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def ask_all(self, asks: list[Ask], on_done: Callable[[int], None] = lambda n: None) -> list[Answer]:
        """Send all at once through the `openai` client, 5 ms apart so that the order of arrival is the same."""
        from openai import OpenAI

        client = OpenAI(base_url=f"{self.url}/v1", api_key="none", timeout=600, max_retries=0)

        def one(index: int, ask: Ask) -> Answer:
            time.sleep(0.005 * index)
            begin = time.monotonic()
            got = client.completions.create(
                model="default",
                prompt=ask.prompt,
                max_tokens=ask.max_tokens,
                temperature=0,
                extra_body={"priority": ask.priority},
            )
            on_done(index)
            usage = got.usage
            assert usage is not None, "the server sent no usage"
            return Answer(got.choices[0].text, time.monotonic() - begin, usage.prompt_tokens, usage.completion_tokens)

        with ThreadPoolExecutor(len(asks)) as pool:
            return list(pool.map(one, range(len(asks)), asks))

    def metric(self, name: str, **labels: str) -> float:
        """Sum of a metric over its series that carry these labels; 0 if there is none."""
        text = urllib.request.urlopen(f"{self.url}/metrics", timeout=30).read().decode()
        total = 0.0
        for line in text.splitlines():
            match = re.fullmatch(r"([^{ ]+)(?:\{(.*)\})? (\S+)", line)
            if (
                match
                and match[1] == name
                and all(f'{key}="{value}"' in (match[2] or "") for key, value in labels.items())
            ):
                total += float(match[3])
        return total

    def wait_idle(self, seconds: float = 60) -> None:
        """Until nothing runs or waits and the idle check has had its turn."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self.check_alive()
            if self.metric("sglang:num_running_reqs") + self.metric("sglang:num_queue_reqs") == 0:
                time.sleep(1.5)  # SGLang checks its pools in each idle round of its loop
                self.check_alive()
                return
            time.sleep(0.3)
        raise TimeoutError(f"{self.name}: still busy after {seconds} s, see {self.log}")

    def check_alive(self) -> None:
        """`RuntimeError` with the end of the log if the server is gone."""
        if self.process.poll() is not None:
            raise RuntimeError(f"{self.name} ended with {self.process.returncode}:\n{self.tail()}")

    def tail(self, lines: int = 30) -> str:
        """The last lines of the log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])


def free_port(taken: Sequence[int] = ()) -> int:
    """A port that nobody listens on now. SGLang takes others within 1,000 above it: it keeps clear of those `taken`."""
    while True:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port: int = probe.getsockname()[1]
        if port < 60000 and all(abs(port - other) > 1000 for other in taken):
            return port


def command(model: Path, port: int, pool_tokens: int, page_size: int, extra: tuple[str, ...] = ()) -> list[str]:
    """The command line of a CPU server with a pool of so many tokens; overlap scheduling is on, as by default."""
    return [
        sys.executable, "-m", "sglang.launch_server", "--model-path", str(model), "--device", "cpu",
        "--attention-backend", "torch_native", "--dtype", "float32", "--page-size", str(page_size),
        "--max-total-tokens", str(pool_tokens), "--max-running-requests", str(MAX_RUNNING), "--context-length", "2048",
        "--chunked-prefill-size", "512", "--enable-priority-scheduling", "--default-priority-value", "0",
        "--schedule-conservativeness", "0.1", "--enable-metrics", "--sleep-on-idle",
        "--skip-server-warmup", "--host", "127.0.0.1", "--port", str(port), *extra,
    ]  # fmt: skip


def environment(tide: dict[str, str] | None) -> dict[str, str]:
    """The environment of a server: with the plugin's variables, or without any of them."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("TIDEKV_", "SGLANG_"))}
    return kept | {
        "SGLANG_USE_CPU_ENGINE": "1", "HF_HUB_OFFLINE": "1", "OMP_WAIT_POLICY": "passive", "PYTHONUNBUFFERED": "1",
    } | (tide or {})  # fmt: skip


@contextmanager
def serve(
    name: str,
    model: Path,
    logs: Path,
    pool_tokens: int,
    page_size: int,
    tide: dict[str, str] | None = None,
    extra: tuple[str, ...] = (),
    port: int | None = None,
) -> Iterator[Server]:
    """A server that answers /health; ended, with all its processes, on the way out. Servers that start at one time need
    ports that keep clear of each other."""
    logs.mkdir(parents=True, exist_ok=True)
    log, port = logs / f"{name}.log", port or free_port()
    with log.open("wb") as out:
        process = subprocess.Popen(
            command(model, port, pool_tokens, page_size, extra), stdout=out, stderr=subprocess.STDOUT,
            env=environment(tide), cwd=logs, start_new_session=True,
        )  # fmt: skip
    server = Server(port, process, log, name)
    try:
        end = time.monotonic() + START_SECONDS
        while not _healthy(server):
            server.check_alive()
            if time.monotonic() > end:
                raise TimeoutError(f"{name} did not start in {START_SECONDS} s:\n{server.tail()}")
            time.sleep(0.5)
        yield server
    finally:
        stop(process)


def _healthy(server: Server) -> bool:
    try:
        with urllib.request.urlopen(f"{server.url}/health", timeout=5) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def stop(process: subprocess.Popen[bytes]) -> None:
    """End the server and whatever it started."""
    try:
        process.terminate()  # it ends its own processes; a signal to them all would make it look for a crash
        process.wait(20)
    except subprocess.TimeoutExpired:
        pass
    except ProcessLookupError:
        return
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    process.wait(20)
