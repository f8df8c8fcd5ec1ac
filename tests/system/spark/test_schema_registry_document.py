"""The example of docs/how-to/schema-registry.md, as a user types it into a shell: only the ports are others."""

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

pytestmark = [pytest.mark.full, pytest.mark.spark, pytest.mark.row("A7")]

TIMEOUT_S = 240.0


def test_example_of_the_schema_registry_registers_evolves_refuses_and_fills_a_table(tmp_path: Path) -> None:
    found = examples("docs/how-to/schema-registry.md")
    assert list(found) == ["start", "publish", "evolve", "refused", "spark", "check", "stop"]
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    (tmp_path / "check.py").write_text(found["check"].code)
    kafka, registry, http = free_port(), free_port(), free_port()
    script = "\n".join("python check.py" if name == "check" else one.code for name, one in found.items())
    script = re.sub(r"(mansio serve)", rf"\1 --kafka 127.0.0.1:{kafka} --http 127.0.0.1:{http}", script)
    script = script.replace(":8081", f":{registry}")
    try:
        done = subprocess.run(
            ["bash", "-euc", f"trap 'kill $(jobs -p) 2>/dev/null' EXIT\n{script}"],
            cwd=tmp_path,
            env=os.environ
            | {
                "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
                "MANSIO_BOOTSTRAP_SERVERS": f"127.0.0.1:{kafka}",
                "SCHEMA_REGISTRY_URL": f"http://127.0.0.1:{registry}",
            },
            capture_output=True,
            text=True,
            timeout=scaled(TIMEOUT_S),
            check=False,
        )
    finally:
        logs = "\n".join(file.read_text() for file in tmp_path.glob("*.log"))
    output = done.stdout + done.stderr
    assert done.returncode == 0, output + logs
    assert "published 100 orders with order-1.avsc" in done.stdout
    assert "\ncompatible\n" in done.stdout
    assert "not compatible:\n" in done.stdout
    assert "TYPE_MISMATCH" in done.stdout
    assert "incompatible with an earlier schema" in done.stderr
    assert "200 orders, 100 without a note" in done.stdout
