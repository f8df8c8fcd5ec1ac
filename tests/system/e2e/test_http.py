"""Health and metrics of a real broker."""

from __future__ import annotations

import re
import signal
from typing import TYPE_CHECKING

import httpx
import pytest

from mansio.client import blocking
from support.machine import scaled
from support.readiness import readiness
from support.waiting import wait_until

if TYPE_CHECKING:
    from support.process import ServedBroker


def numbers(broker: ServedBroker) -> dict[str, float]:
    text = httpx.get(f"{broker.http_url}/metrics", timeout=scaled(10)).text
    return {
        found[1]: float(found[2])
        for found in re.finditer(r"^(mansio_[^ ]+) ([-+.eE0-9]+)$", text, re.MULTILINE)
    }


@pytest.mark.row("T5")
def test_metrics_follow_what_happens(served_broker: ServedBroker) -> None:
    before = numbers(served_broker)
    assert before["mansio_partitions"] == 0
    with blocking.connect(served_broker.bootstrap_servers) as client:
        client.admin.create_topic("counted", partitions=2)
        client.publish("counted", b"x" * 500, partition=1)
    after = numbers(served_broker)
    assert after["mansio_partitions"] == 2
    assert after['mansio_partition_high_watermark{partition="1",topic="counted"}'] == 1
    assert after['mansio_partition_log_end_offset{partition="0",topic="counted"}'] == 0
    assert after["mansio_appended_batches_total"] - before["mansio_appended_batches_total"] == 1
    assert after["mansio_appended_bytes_total"] - before["mansio_appended_bytes_total"] > 500
    assert after['mansio_requests_total{api="produce"}'] == 1


@pytest.mark.row("T5")
def test_ready_while_it_serves_and_after_a_pause_it_reports_the_loop_stood_still(
    served_broker: ServedBroker,
) -> None:
    assert readiness(served_broker.http_url)["ready"]
    served_broker.signal(signal.SIGSTOP)
    try:
        with pytest.raises(httpx.TimeoutException):
            httpx.get(f"{served_broker.http_url}/health/live", timeout=1.5)
    finally:
        served_broker.signal(signal.SIGCONT)

    def reported() -> set[str]:
        answer = httpx.get(f"{served_broker.http_url}/health/ready", timeout=scaled(10)).json()
        return {each["reason"] for each in (*answer["reasons"], *answer["warnings"])}

    wait_until(lambda: "event_loop_stalled" in reported(), 10, "the stall is reported")
    assert httpx.get(f"{served_broker.http_url}/health/live", timeout=scaled(10)).status_code == 200
    assert served_broker.stop() == 0
