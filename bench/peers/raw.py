"""Raw load as a candidate: `bench.load`'s prebuilt requests, without a client library.

Its latency is a lower bound and not the same work: one process that never sleeps publishes over one connection without
waiting for acknowledgements and fetches over another, while the other candidates have five processes that must be woken
and that acknowledge what they received.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

from bench.peers.peer import ROOT

if TYPE_CHECKING:
    from bench.peers.workloads import Workload

RAW_DEADLINE_S = 60.0
SHARE_DEPTH = 2
"""Unanswered requests of a share group member, in batches; one record at a time has one."""


def raw_run(port: int, queue: str, workload: Workload, *, size: int, seconds: float) -> dict[str, Any]:
    """The workload, on a queue of Mansio at 127.0.0.1:`port`: the fields of a `Run`. `RuntimeError` when it fails."""
    mode = ["deliver", "--rate", "1000"] if workload.name == "latency" else ["produce"]
    if workload.consumers:
        mode = ["share", "--depth", str(SHARE_DEPTH if workload.batch > 1 else 1)]
    asked = {
        "acks": -1,
        "records": workload.batch,
        "connections": workload.consumers or workload.producers,
        "size": size,
        "seconds": seconds,
    }
    arguments = [f"--{name}={value}" for name, value in asked.items()]
    command = [sys.executable, "-m", "bench.load", *mode, "--port", str(port), "--topic", queue, *arguments]
    began = time.time()
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=RAW_DEADLINE_S, check=False
    )
    if done.returncode:
        raise RuntimeError(done.stderr.strip())
    result = json.loads(done.stdout)
    if not result["records_per_s"]:
        raise RuntimeError("no record came in the time")
    found = {
        "messages": round(result["records_per_s"] * result["seconds"]),
        "seconds": result["seconds"],
        "messages_per_s": result["records_per_s"],
        "began": began,
        "ended": time.time(),
    }
    if workload.name == "latency":
        found |= {name: result[name] for name in ("p50_us", "p99_us")}
    if workload.consumers:  # without the start of the load generator
        found["client_us"] = round(result["load_cpu"] * 1e6 / result["records_per_s"], 1)
    return found
