"""200 random requests with aborts against one small tidekv server; afterwards pool, host pool and tree must be clean.

Lengths, priorities, shared prefixes, streaming and the moments of aborts are random from a seed. SGLang's own checks
are on and strict: a leaked page or row ends the server. tidekv recounts its books whenever the server comes to rest.
"""

from __future__ import annotations

import json
import random
import sys
import threading
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from serving import Server

WORDS = ("tide", "moon", "harbour", "rope", "lamp", "storm", "chart", "gull", "salt", "keel", "north", "foam")


@dataclass
class Tally:
    """What became of the requests."""

    finished: int = 0
    aborted: int = 0
    failed: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)


def post(server: Server, path: str, body: dict[str, Any], timeout: float = 300) -> Any:
    """POST JSON; the answer as JSON (or text where it is none)."""
    request = urllib.request.Request(
        server.url + path, json.dumps(body).encode(), {"content-type": "application/json"}, method="POST"
    )
    with urllib.request.urlopen(request, timeout=timeout) as response:
        text = response.read().decode()
    try:
        return json.loads(text)
    except ValueError:
        return text


def soak(server: Server, num_requests: int, seed: int, at_a_time: int = 24) -> Tally:
    """Send them, `at_a_time` open at a time; a quarter is aborted by id after a random while."""
    rng = random.Random(seed)
    shared = [" ".join(rng.choices(WORDS, k=rng.randint(20, 60))) for _ in range(4)]
    plans: list[dict[str, Any]] = []
    for i in range(num_requests):
        prefix = rng.choice(shared) if rng.random() < 0.5 else ""
        length, ignore_eos = rng.randint(1, 28), rng.random() < 0.5
        plans.append({
            "rid": f"soak-{seed}-{i}",
            "text": f"{prefix} {' '.join(rng.choices(WORDS, k=rng.randint(2, 70)))}",
            "sampling_params": {"temperature": 0, "max_new_tokens": length, "ignore_eos": ignore_eos},
            "priority": rng.choice([0, 0, 10]),
        })  # fmt: skip
    aborts = {plan["rid"]: rng.uniform(0.05, 5.0) for plan in plans if rng.random() < 0.25}
    tally = Tally()

    def one(plan: dict[str, Any]) -> None:
        rid = str(plan["rid"])
        timer = None
        if rid in aborts:
            timer = threading.Timer(aborts[rid], post, (server, "/abort_request", {"rid": rid}))
            timer.start()
        try:
            got = post(server, "/generate", plan)
            reason = got["meta_info"]["finish_reason"]["type"]
            with tally.lock:
                if reason == "abort":
                    tally.aborted += 1
                else:
                    tally.finished += 1
        except urllib.error.HTTPError as error:  # an aborted request may end in an error status
            with tally.lock:
                if rid in aborts:
                    tally.aborted += 1
                else:
                    tally.failed.append(f"{rid}: {error.code} {error.read()[:200]!r}")
        finally:
            if timer is not None:
                timer.join()
        done = tally.finished + tally.aborted + len(tally.failed)
        if done % 20 == 0:
            print(f"  soak: {done} of {num_requests}", file=sys.stderr, flush=True)

    with ThreadPoolExecutor(at_a_time) as pool:
        list(pool.map(one, plans))
    return tally


def clean_up(server: Server) -> None:
    """Drop the prefix cache; waits until the server is idle first."""
    server.wait_idle()
    for _ in range(20):
        try:
            post(server, "/flush_cache", {})
            break
        except urllib.error.HTTPError:  # still something in flight
            time.sleep(0.5)
    server.wait_idle()
    time.sleep(1.5)
