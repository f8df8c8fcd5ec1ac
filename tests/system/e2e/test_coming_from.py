"""The examples in the pages for people who come from another system, run as `test_examples` runs the others."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from support.documents import Example, examples
from support.machine import scaled
from support.waiting import wait_until
from system.e2e.test_examples import EXAMPLE_DEADLINE_S, run_in_order, started

if TYPE_CHECKING:
    from pathlib import Path

KAFKA = "kafka-1.example.org:9092"
"""The other cluster in the page about Kafka."""


@pytest.mark.full
def test_the_examples_for_people_from_kafka_work_in_their_order(tmp_path: Path) -> None:
    page = "docs/how-to/from-kafka.md"
    found = examples(page)
    expected = {
        "confluent": "order 0\norder 1\norder 2\n",
        "shell": "order 3\n",
        "share": "",
        "redrive": "order 1\n",
        "mirror": "2 offsets of groups translated",
    }
    assert list(found) == ["serve", *expected]
    directories = [tmp_path / "there", tmp_path / "here"]
    for directory in directories:
        directory.mkdir()
    with started(directories[0], page) as there, started(directories[1], page) as here:
        run_in_order(there, found, {name: words for name, words in expected.items() if name != "mirror"})
        mirror = found["mirror"]
        outcome = here.run(mirror._replace(code=mirror.code.replace(KAFKA, there.bootstrap_servers)))
    assert outcome.code == 0, outcome.output
    assert "mirror-orders: 4 records in" in outcome.output, outcome.output
    assert expected["mirror"] in outcome.output, outcome.output


@pytest.mark.full
def test_the_examples_for_people_from_rabbitmq_work_in_their_order(tmp_path: Path) -> None:
    page = "docs/how-to/from-rabbitmq.md"
    found = examples(page)
    assert list(found) == ["serve", "topic", "worker", "run", "publish", "look"]
    peek = Example("peek", "sh", "mansio dlq peek mails")
    with started(tmp_path, page) as bench:
        run_in_order(bench, found, {"topic": ""})
        (bench.directory / "worker.py").write_text(bench.code(found["worker"]))
        with bench.working(found["run"]) as log:
            run_in_order(bench, found, {"publish": ""})
            wait_until(lambda: log.read_text().count("mail to ") == 2, 60, "two mails")
            wait_until(lambda: "nobody" in bench.run(peek).output, 60, "the dead letter")
            run_in_order(bench, found, {"look": "no address: b'nobody'"})
            mails = sorted(log.read_text().splitlines())
            assert mails == ["mail to ann@example.org", "mail to bob@example.org"]


@pytest.mark.full
def test_the_examples_for_people_from_sqs_work_in_their_order(tmp_path: Path) -> None:
    page = "docs/how-to/from-sqs.md"
    found = examples(page)
    expected = {"environment": "resize 1.png\n", "native": "1.png\n", "both": "received resize 3.png\n"}
    assert list(found) == ["serve", "jobs", *expected]
    with started(tmp_path, page) as bench:
        (bench.directory / "jobs.py").write_text(found["jobs"].code)
        run_in_order(bench, found, expected)


@pytest.mark.full
def test_the_test_files_in_the_page_about_pytest_pass(tmp_path: Path) -> None:
    found = examples("docs/how-to/pytest.md")
    assert list(found) == ["kafka", "sqs", "time"]
    for name, example in found.items():
        (tmp_path / f"test_{name}.py").write_text(example.code)
    command = [sys.executable, "-m", "pytest", "-q", "-n0", "-p", "no:cacheprovider", str(tmp_path)]
    subprocess.run(command, cwd=tmp_path, check=True, timeout=scaled(EXAMPLE_DEADLINE_S))
