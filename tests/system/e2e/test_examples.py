"""The examples of the README and the documents are run as they stand, in order, against one broker.

Only the addresses are other ones: the listeners by environment, the bootstrap address by replacing the text.
An example is a fenced block right behind a line `<!-- example: NAME -->`.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pytest

from support.documents import Example, examples, lines_to_compare
from support.machine import scaled
from support.paths import ROOT, TOOLS, free_port, required_tool
from support.schema_registry import RegistryServer
from support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

EXAMPLE_DEADLINE_S = 60
README_LINES_MAX = 150
INSTALLS_FROM_AN_INDEX = re.compile(r"pip install [^`\n]*?(?<![\w./-])['\"]?mansio(?![\w\[./-])")
BOOTSTRAP = "127.0.0.1:9092"
HTTP = "127.0.0.1:9080"
SQS = "127.0.0.1:9324"
GRPC = "127.0.0.1:50051"
SOURCE_FILES = (".py", ".java", ".go")
LIBRARIES_WARNINGS = [
    part
    for words in (
        "read_text is deprecated",  # of importlib.resources, used by kafka-python
        "open_text is deprecated",
        "The `api_version` parameter has been deprecated",  # of aiokafka, used by taskiq-aio-kafka
    )
    for part in ("-W", f"ignore:{words}:DeprecationWarning")
]


class Outcome(NamedTuple):
    code: int
    output: str


class Bench:
    """A directory with a broker started by the README's own command."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.bootstrap_servers = f"127.0.0.1:{free_port()}"
        self.http = f"127.0.0.1:{free_port()}"
        self.sqs = f"127.0.0.1:{free_port()}"
        self.grpc = f"127.0.0.1:{free_port()}"
        self.addresses = {
            BOOTSTRAP: self.bootstrap_servers,
            HTTP: self.http,
            SQS: self.sqs,
            GRPC: self.grpc,
        }
        paths = [str(Path(sys.executable).parent), str(TOOLS), os.environ.get("PATH", "")]
        self.environment = {
            **{name: value for name, value in os.environ.items() if name != "PYTEST_ADDOPTS"},
            "PATH": os.pathsep.join(paths),
            "PYTHONUNBUFFERED": "1",
            "MANSIO_BOOTSTRAP_SERVERS": self.bootstrap_servers,
            "MANSIO_LISTENERS": self.bootstrap_servers,
            "MANSIO_HTTP_LISTENER": self.http,
            "MANSIO_SQS_LISTENER": self.sqs,
            "MANSIO_GRPC_LISTENER": self.grpc,
        }

    def code(self, example: Example) -> str:
        """The example with the addresses of this broker."""
        code = example.code
        for address, own in self.addresses.items():
            code = code.replace(address, own)
        return code

    def printed(self, output: str) -> list[str]:
        """The lines of an output as the page has them: with its addresses, without what varies."""
        for address, own in self.addresses.items():
            output = output.replace(own, address)
        return lines_to_compare(output)

    def command(self, example: Example) -> list[str]:
        code = self.code(example)
        if example.language == "python":
            return [sys.executable, "-W", "error", *LIBRARIES_WARNINGS, "-c", code]
        assert example.language == "sh", f"{example.name}: nobody knows how to run {example.language}"
        return ["sh", "-euc", f"exec {code.strip()}" if example.name.startswith("serve") else code]

    def run(self, example: Example) -> Outcome:
        """Run an example; one whose name is that of a source file is saved only."""
        if example.name.endswith(SOURCE_FILES):
            file = self.directory / example.name
            file.parent.mkdir(exist_ok=True)
            file.write_text(self.code(example))
            return Outcome(0, "")
        done = subprocess.run(
            self.command(example),
            cwd=self.directory,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=scaled(EXAMPLE_DEADLINE_S),
            check=False,
        )
        return Outcome(done.returncode, done.stdout)

    def follow(
        self, found: Mapping[str, Example], *, unordered: Collection[str] = ()
    ) -> dict[str, list[str]]:
        """Run the examples of a page in their order, and compare each output with the one that the page shows.

        Returns the lines of the outputs. `unordered`: names of examples whose lines may come in any order.
        """
        printed = {}
        for name, example in found.items():
            if name.startswith("serve"):
                continue
            outcome = self.run(example)
            assert outcome.code == 0, f"{name}:\n{outcome.output}"
            lines = printed[name] = self.printed(outcome.output)
            if example.shown is not None:
                shown = lines_to_compare(example.shown)
                if name in unordered:
                    lines, shown = sorted(lines), sorted(shown)
                assert lines == shown, f"{name}:\n{outcome.output}"
        return printed

    @contextmanager
    def working(self, example: Example, *, ending: signal.Signals = signal.SIGKILL) -> Iterator[Path]:
        """A worker, started by an example; its processes get the signal `ending`. Yields the file of its output."""
        log = self.directory / f"{example.name}.log"
        with log.open("wb") as output:
            worker = subprocess.Popen(
                self.command(example),
                cwd=self.directory,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            yield log
        finally:
            os.killpg(worker.pid, ending)
            worker.wait()


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    """The README's broker, started by the README's command."""
    with started(tmp_path, "README.md") as bench:
        yield bench


@contextmanager
def started(
    tmp_path: Path, document: str, kind: type[Bench] = Bench, command: str = "serve"
) -> Iterator[Bench]:
    """A broker that is started by a command of a document."""
    bench = kind(tmp_path)
    log = tmp_path / f"{command}.log"
    with log.open("wb") as output:
        serving = subprocess.Popen(
            bench.command(examples(document)[command]),
            cwd=tmp_path,
            env=bench.environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        wait_until(
            lambda: b" ready kafka=" in log.read_bytes() or serving.poll() is not None, 30, "the ready line"
        )
        assert serving.poll() is None, log.read_text()
        yield bench
    finally:
        serving.kill()
        serving.wait()


def run_in_order(bench: Bench, found: dict[str, Example], expected: dict[str, str]) -> None:
    """Run examples in the order of their page; each must succeed and print some words."""
    for name, words in expected.items():
        outcome = bench.run(found[name])
        assert outcome.code == 0, f"{name}:\n{outcome.output}"
        assert words in outcome.output, f"{name}:\n{outcome.output}"


def test_examples_of_the_readme_work_in_their_order(bench: Bench) -> None:
    expected = {"topic": "", "python": "b'2 apples' 2\n", "confluent": "b'"}
    found = examples("README.md")
    # The example with Spark runs in tests/system/spark/test_pipelines_document.py.
    assert set(found) == {"serve", "spark", "test", *expected}
    for name, words in expected.items():
        outcome = bench.run(found[name])
        assert outcome.code == 0, f"{name}:\n{outcome.output}"
        assert words in outcome.output, f"{name}:\n{outcome.output}"


@pytest.mark.full
def test_the_test_in_the_readme_passes(tmp_path: Path) -> None:
    (tmp_path / "test_readme.py").write_text(examples("README.md")["test"].code)
    command = [sys.executable, "-m", "pytest", "-q", "-n0", "-p", "no:cacheprovider", str(tmp_path)]
    subprocess.run(command, cwd=tmp_path, check=True, timeout=scaled(EXAMPLE_DEADLINE_S))


@pytest.mark.full
def test_the_example_on_the_start_page_of_the_site_works(bench: Bench) -> None:
    outcome = bench.run(examples("docs/index.md")["embedded"])
    assert outcome.code == 0, outcome.output
    assert outcome.output.endswith("0 b'ann' b'2 apples'\n"), outcome.output


@pytest.mark.full
def test_the_examples_about_delays_work_in_their_order(bench: Bench, tmp_path: Path) -> None:
    found = examples("docs/how-to/delays.md")
    *programs, test = found
    assert programs == ["python", "shell", "confluent", "kafka-python", "commands", "admin"]
    for name in programs:
        outcome = bench.run(found[name])
        assert outcome.code == 0, f"{name}:\n{outcome.output}"
    (tmp_path / "test_delays.py").write_text(found[test].code)
    command = [sys.executable, "-m", "pytest", "-q", "-n0", "-p", "no:cacheprovider", str(tmp_path)]
    subprocess.run(command, cwd=tmp_path, check=True, timeout=scaled(EXAMPLE_DEADLINE_S))


@pytest.mark.full
def test_the_examples_about_deduplication_work_in_their_order(bench: Bench) -> None:
    found = examples("docs/how-to/deduplication.md")
    assert [*found] == ["python", "confluent", "shell"]
    for name, words in {"python": "3 payments\n", "confluent": "", "shell": "invoice 4711"}.items():
        outcome = bench.run(found[name])
        assert outcome.code == 0, f"{name}:\n{outcome.output}"
        assert words in outcome.output, f"{name}:\n{outcome.output}"
        assert outcome.output.count("invoice 4711") <= 1, outcome.output


@pytest.mark.full
def test_the_example_about_the_check_of_schemas_works(bench: Bench) -> None:
    found = examples("docs/how-to/schema-validation.md")
    assert [*found] == ["shell"]
    outcome = bench.run(found["shell"])
    assert outcome.code == 0, outcome.output
    assert "the value has no schema id" in outcome.output
    assert "refused" in outcome.output


@pytest.mark.full
def test_the_examples_about_priorities_work_in_their_order(bench: Bench) -> None:
    expected = {
        "python": "reset a password\nsend a receipt\nrebuild the index\n",
        "confluent": "alarm was the first of 11\n",
        "shell": "invoice\nnewsletter\n",
    }
    found = examples("docs/how-to/priorities.md")
    assert list(found) == list(expected)
    run_in_order(bench, found, expected)


@pytest.mark.full
@pytest.mark.row("T1")
def test_the_examples_about_history_work_in_their_order(bench: Bench) -> None:
    found = examples("docs/how-to/history.md")
    here = ["python", "shell", "find", "search"]
    assert list(found) == [*here, "deliveries", "trace-report"]
    run_in_order(
        bench,
        {name: found[name] for name in here},  # those with Spark: test_pipelines_document.py
        {
            "python": "delivered 1\nreleased 1\ndelivered 2\nrejected 2\n",
            "shell": "certain: nothing is missing",
            "find": "0 1 ",
            "search": '"kind": "published"',
        },
    )


@pytest.mark.full
def test_the_examples_about_why_a_group_waits_work_in_their_order(bench: Bench) -> None:
    expected = {
        "why": "  mansio consume parcels --share-group couriers\n",
        "python": "blocked no-member 3\n",
    }
    found = examples("docs/how-to/why-a-group-waits.md")
    assert list(found) == list(expected)
    run_in_order(bench, found, expected)


@pytest.mark.full
def test_the_examples_about_hot_partitions_work_in_their_order(tmp_path: Path) -> None:
    document = "docs/how-to/hot-partitions.md"
    expected = {
        "load": "1 hot partition: b'customer 7' isolate-key\n",
        "hot": "customer 7: 9",  # its remedy depends on whether the load goes on, which the first example ends
        "forbid": "",
    }
    found = examples(document)
    assert list(found) == ["serve", *expected]
    with started(tmp_path, document) as bench:
        run_in_order(bench, found, expected)


@pytest.mark.full
@pytest.mark.row("T5")
def test_the_examples_about_opentelemetry_print_what_the_page_shows(bench: Bench) -> None:
    found = examples("docs/how-to/opentelemetry.md")
    assert list(found) == ["python", "consumer"]
    bench.follow(found)


@pytest.mark.full
def test_the_example_about_agents_prints_what_the_page_shows(bench: Bench) -> None:
    found = examples("docs/how-to/agents.md")
    assert list(found) == ["python"]
    bench.follow(found)


@pytest.mark.full
def test_the_examples_about_schemas_print_what_the_page_shows(bench: Bench) -> None:
    found = examples("docs/how-to/schemas.md")
    assert list(found) == ["python", "consume"]
    with RegistryServer() as server:
        bench.addresses["http://127.0.0.1:8081"] = server.url
        bench.follow(found)


@pytest.mark.full
def test_the_examples_about_http_work_in_their_order(bench: Bench) -> None:
    required_tool("curl")
    expected = {
        "curl": '"acknowledged":1',
        "batch": '"failed":0',
        "read": '"value":"2 apples"',
        "delay": '"changed":["0:',
        "python": "2 apples 0\n",
    }
    found = examples("docs/reference/http.md")
    assert list(found) == list(expected)
    run_in_order(bench, found, expected)


@pytest.mark.full
def test_the_examples_about_sqs_work_in_their_order(bench: Bench) -> None:
    expected = {
        "boto3": "resize 1.png\n",
        "shell": "resize 1.png\n",
        "fifo": "['10', '20']\n",
        "tenants": "['ann 1', 'bob 1']\n",
    }
    found = examples("docs/reference/sqs.md")
    assert list(found) == ["serve", *expected]
    run_in_order(bench, found, expected)


@pytest.mark.full
def test_the_example_about_transactions_works(tmp_path: Path) -> None:
    with started(tmp_path, "docs/how-to/transactions.md") as bench:
        found = examples("docs/how-to/transactions.md")
        expected = {
            "read-process-write": "billed 3\n",
            "client": "audited 5 EUR\n",
            "process": "processed 1\n",
        }
        assert list(found) == ["serve", *expected]
        for name, words in expected.items():
            outcome = bench.run(found[name])
            assert outcome.code == 0, f"{name}:\n{outcome.output}"
            assert outcome.output.endswith(words), f"{name}:\n{outcome.output}"


def test_the_example_about_grpc_works(bench: Bench) -> None:
    found = examples("docs/reference/grpc.md")
    outcome = bench.run(found["python"])
    assert outcome.code == 0, outcome.output
    assert outcome.output == "b'0 apples'\nb'1 apples'\nb'2 apples'\n"


@pytest.mark.full
def test_the_examples_about_schedules_work_in_their_order(bench: Bench, tmp_path: Path) -> None:
    found = examples("docs/how-to/schedules.md")
    assert [*found] == ["shell", "python", "fixture"]
    for name, words in {"shell": "0 9 * * mon-fri Europe/Berlin", "python": "b'1' b'pulse'\n"}.items():
        outcome = bench.run(found[name])
        assert outcome.code == 0, f"{name}:\n{outcome.output}"
        assert words in outcome.output, f"{name}:\n{outcome.output}"
    (tmp_path / "test_schedules.py").write_text(found["fixture"].code)
    command = [sys.executable, "-m", "pytest", "-q", "-n0", "-p", "no:cacheprovider", str(tmp_path)]
    subprocess.run(command, cwd=tmp_path, check=True, timeout=scaled(EXAMPLE_DEADLINE_S))


@pytest.mark.full
def test_the_examples_about_task_frameworks_work_in_their_order(bench: Bench) -> None:
    found = examples("docs/how-to/frameworks.md")
    taskiq = ["taskiq", "taskiq-worker", "taskiq-publish"]
    dramatiq = ["dramatiq", "dramatiq-worker", "dramatiq-publish", "dramatiq-commands"]
    assert list(found) == ["faststream", *taskiq, *dramatiq]
    (bench.directory / "mails.py").write_text(bench.code(found["taskiq"]))
    (bench.directory / "charges.py").write_text(bench.code(found["dramatiq"]))
    with bench.working(found["taskiq-worker"]) as mails, bench.working(found["dramatiq-worker"]) as charges:
        wait_until(lambda: "Listening started" in mails.read_text(), 60, "the worker of Taskiq")
        for name, words in {
            "taskiq-publish": "",
            "dramatiq-publish": "",
            "dramatiq-commands": "0:1 ",
        }.items():
            outcome = bench.run(found[name])
            assert outcome.code == 0, f"{name}:\n{outcome.output}"
            assert words in outcome.output, f"{name}:\n{outcome.output}"
        wait_until(lambda: "mail to ann@example.org\n" in mails.read_text(), 30, "the mail")
        wait_until(lambda: "charge ann\n" in charges.read_text(), 30, "the charge")
        assert "bob" not in charges.read_text()


@pytest.mark.full
def test_the_example_about_faststream_passes(tmp_path: Path) -> None:
    (tmp_path / "test_orders.py").write_text(examples("docs/how-to/frameworks.md")["faststream"].code)
    command = [sys.executable, "-m", "pytest", "-q", "-n0", "-p", "no:cacheprovider", str(tmp_path)]
    subprocess.run(command, cwd=tmp_path, check=True, timeout=scaled(EXAMPLE_DEADLINE_S))


@pytest.mark.full
def test_the_examples_about_celery_over_sqs_work_in_their_order(bench: Bench) -> None:
    found = {
        name: it for name, it in examples("docs/how-to/from-celery.md").items() if name.startswith("sqs-")
    }
    assert list(found) == ["sqs-shop", "sqs-worker", "sqs-publish"]
    (bench.directory / "billing.py").write_text(found["sqs-shop"].code)
    with bench.working(found["sqs-worker"]) as log:
        outcome = bench.run(found["sqs-publish"])
        assert outcome.code == 0, outcome.output
        delayed = outcome.output.splitlines()[1:]
        assert len(delayed) == 1, outcome.output
        wait_until(lambda: "bill for 2 apples" in log.read_text(), 60, "a task")
        wait_until(lambda: "bill for 3 figs" in log.read_text(), 60, "the task with a countdown")
        assert "plums" not in log.read_text()


def test_no_document_installs_mansio_from_an_index() -> None:
    """The name is another distribution's there. With an extra the command is right where a wheel is installed."""
    listed = subprocess.check_output(
        ["git", "ls-files", "*.md", "*.yml", "*.toml", "src/*.py"], cwd=ROOT, text=True
    )
    wrong = {
        name: found
        for name in listed.splitlines()
        if (found := INSTALLS_FROM_AN_INDEX.findall((ROOT / name).read_text()))
    }
    assert wrong == {}


def test_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= README_LINES_MAX


@pytest.mark.full
def test_the_examples_about_delivery_work_in_their_order(bench: Bench) -> None:
    expected = {
        "prepare": "",
        "receive": "b'ann' b'apples' 2\n",
        "dlq": "no amount: some",
        "confluent": "b'some pears' 1\n",
        "batches": "counted 3\n",
        "next": "printed 3\n",
        "by-key": "",
        "leases": "b'ann' b'paid'\n",
        "async-leases": "True\n",
        "confluent-by-key": "True\n",
        "limits": "",
        "limited": "2 more\n",
        "confluent-limited": "at most 2 of ann at once\n",
        "fair-publish": "",
        "fair-receive": "True\n",
        "fair-confluent": "True\n",
        "fair-sqs": "True\n",
        "run": "packed b'bob'\n",
    }
    found = examples("docs/reference/delivery.md")
    assert list(found) == list(expected)
    for name, words in expected.items():
        outcome = bench.run(found[name])
        assert outcome.code == 0, f"{name}:\n{outcome.output}"
        assert words in outcome.output, f"{name}:\n{outcome.output}"
        if name == "dlq":
            assert outcome.output.endswith("some pears\n"), outcome.output
