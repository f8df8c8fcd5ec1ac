"""The example of docs/how-to/avro-to-iceberg.md, as a user types it into a shell: only the ports are others."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from support.documents import examples
from support.machine import scaled
from support.paths import ROOT, free_port

pytestmark = [pytest.mark.full, pytest.mark.spark]

TIMEOUT_S = 300.0
ORDERS = 80_000


def test_example_from_avro_to_iceberg_survives_its_kill_and_has_each_order_once(tmp_path: Path) -> None:
    found = examples("docs/how-to/avro-to-iceberg.md")
    assert list(found) == ["start", "run", "kill", "continue", "check", "stop"]
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    (tmp_path / "check.py").write_text(found["check"].code)
    kafka, registry, http = free_port(), free_port(), free_port()
    script = "\n".join("python check.py" if name == "check" else one.code for name, one in found.items())
    script = re.sub(r"(mansio serve)", rf"\1 --kafka 127.0.0.1:{kafka} --http 127.0.0.1:{http}", script)
    script = script.replace(":8081", f":{registry}")
    script = script.replace("publish_orders.py", f"publish_orders.py --registry http://127.0.0.1:{registry}")
    try:
        done = subprocess.run(
            ["bash", "-euc", f"trap 'kill $(jobs -p) 2>/dev/null' EXIT\n{script}"],
            cwd=tmp_path,
            env=os.environ
            | {
                "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
                "MANSIO_BOOTSTRAP_SERVERS": f"127.0.0.1:{kafka}",
            },
            capture_output=True,
            text=True,
            timeout=scaled(TIMEOUT_S),
            check=False,
        )
    finally:
        logs = "\n".join(file.read_text() for file in tmp_path.glob("*.log"))
    assert done.returncode == 0, done.stdout + done.stderr + logs
    assert f"{ORDERS} orders, {ORDERS} different ids" in done.stdout
    assert "DuckDB: INSTALL iceberg" in done.stderr
