"""`mansio data check` on directories of real brokers: a killed broker leaves no damage, and damage is reported."""

from __future__ import annotations

import json
import random
from typing import TYPE_CHECKING

import pytest

import mansio
from support.process import ServedBroker
from system.e2e.test_cli import Shell

if TYPE_CHECKING:
    from pathlib import Path

RECORDS = 40


@pytest.mark.row("A6")
def test_a_killed_brokers_directory_is_healthy_and_a_rotten_index_is_not(tmp_path: Path) -> None:
    never = {
        "MANSIO_LOG_FLUSH_OFFSET_CHECKPOINT_INTERVAL_MS": "600000"
    }  # so that no index of a closed segment is written
    broker = ServedBroker(tmp_path / "data", environment=never, http=False)
    shell = Shell(broker.start().bootstrap_servers)
    try:
        with mansio.blocking.connect(broker.bootstrap_servers) as client:
            client.admin.create_topic("t", config={"segment.bytes": "5000"})
            for number in range(RECORDS):
                client.publish("t", random.Random(number).randbytes(1000))
        broker.kill()
        (log,) = broker.data.glob("topics/t.*/0")
        assert len(list(log.glob("*.log"))) > len(list(log.glob("*.index"))) + 3
        out = shell("data", "check", str(broker.data))
        assert "REBUILD" not in out
        assert "ok: " in out
        assert "missing indexes" in out
        assert out.endswith("No damage found.\n")
        reported = shell.json("data", "check", str(broker.data))
        assert reported["clean"] is True
        assert {finding["what"] for one in reported["partitions"] for finding in one["findings"]} == {
            "missing"
        }
        broker.start()
        read = shell.json_lines("consume", "t", "--exit-at-end")
        assert [record["offset"] for record in read] == list(range(RECORDS))
        assert broker.stop() == 0
    finally:
        broker.kill()
    index = sorted(log.glob("*.index"))[1]
    content = bytearray(index.read_bytes())
    content[-1] ^= 1
    index.write_bytes(content)
    assert json.loads(shell("data", "check", str(broker.data), "-o", "json", code=1))["clean"] is False
    assert "REBUILD" in shell("data", "check", str(broker.data), code=1)
    shell("data", "check", str(broker.data), "--repair")
    (log / "checkpoint").unlink()
    assert "checkpoint: missing" in shell("data", "check", str(broker.data), code=1)
