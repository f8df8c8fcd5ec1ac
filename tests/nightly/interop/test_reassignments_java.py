"""`kafka-reassign-partitions.sh` of Apache Kafka generates, executes, verifies and cancels moves of a real cluster."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING

import pytest

from mansio import blocking
from nightly.interop.test_admin_java import TOOLS, Java, fetch_tools
from support.cluster import cluster
from system.cluster.load import create_topic

if TYPE_CHECKING:
    from pathlib import Path

REASSIGN = f"{TOOLS}.reassign.ReassignPartitionsCommand"
PARTITIONS = 4
THROTTLE = 10_000_000
RECORDS = 120
"""Of 100 kB, so that a move at 1,000 bytes per second does not end."""


@pytest.mark.row("C3", "A1")
@pytest.mark.timeout(600)
def test_kafkas_tool_moves_partitions_and_moves_them_back(tmp_path: Path) -> None:
    fetch_tools()
    with cluster(tmp_path, brokers=4) as one:
        create_topic(one, "t", PARTITIONS)
        java = Java(one.bootstrap_servers)
        topics, plan, back = (tmp_path / name for name in ("topics.json", "plan.json", "back.json"))
        topics.write_text(json.dumps({"version": 1, "topics": [{"topic": "t"}]}))
        generated = java(
            REASSIGN, "--generate", "--topics-to-move-json-file", str(topics), "--broker-list", "2,3,4"
        )
        before, proposed = (line for line in generated.splitlines() if line.startswith("{"))
        back.write_text(before)
        plan.write_text(proposed)
        started = java(
            REASSIGN, "--execute", "--reassignment-json-file", str(plan), "--throttle", f"{THROTTLE}"
        )
        assert "Successfully started partition reassignments" in started
        wanted = {each["partition"]: each["replicas"] for each in json.loads(proposed)["partitions"]}

        def moved() -> bool:
            return {place.index: [*place.replicas] for place in one.places("t")} == wanted

        one.wait(moved, "the partitions are moved")
        verified = java(REASSIGN, "--verify", "--reassignment-json-file", str(plan))
        assert verified.count("is completed") == PARTITIONS
        assert "Clearing broker-level throttles" in verified
        assert "No partition reassignments found" in java(REASSIGN, "--list")
        with blocking.connect(one.bootstrap_servers) as client, client.producer() as producer:
            for number in range(RECORDS):
                producer.send("t", os.urandom(100_000), partition=number % PARTITIONS)
        java(REASSIGN, "--execute", "--reassignment-json-file", str(back), "--throttle", "1000")
        assert "t-" in java(REASSIGN, "--list")
        cancelled = java(REASSIGN, "--cancel", "--reassignment-json-file", str(back))
        assert "Successfully cancelled partition reassignment" in cancelled
        assert "No partition reassignments found" in java(REASSIGN, "--list")
        assert any({*place.replicas} == {*wanted[place.index]} for place in one.places("t"))
        one.wait_in_sync("t")
        one.check_logs()
