"""moto's tests of its SQS, against the SQS endpoint of one broker.

They are in moto's source distribution. The suite runs them in an environment of its own, in the mode in which moto's
authors run them against a server, where tests that look into moto or change its clock skip themselves.
"""

from __future__ import annotations

import shutil
import sys
import tarfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import TYPE_CHECKING, Final

from nightly.suites.brokers import FOLDER
from nightly.suites.commands import checked
from nightly.suites.commands import run as run_command
from nightly.suites.suite import Outcome, Suite
from support.paths import ROOT, free_port
from support.process import ServedBroker

if TYPE_CHECKING:
    from nightly.suites.expected import Expected
    from nightly.suites.suite import Outcomes

VERSION = "5.2.5"
FILES: Final = ("test_sqs.py", "test_sqs_message_attributes.py")
"""Others test moto's server process, its accounts, or services beside SQS."""

INSTALL_LIMIT_S = 600
LIMIT_S = 900
TEST_LIMIT_S = 60

_THEIR_SERVER: Final = "http://localhost:5000"
_NEEDED: Final = (f"moto[sqs]=={VERSION}", "boto3", "freezegun", "pytest", "pytest-timeout", "requests")
_ENDED: Final = (0, 1)
"""Exit codes of pytest when all tests passed, and when some failed."""


def run(directory: Path, _expected: Expected, only: frozenset[str] | None) -> Outcomes:
    tree, python = directory / "tree", directory / "venv" / "bin" / "python"
    if only is None:
        _install(directory, tree, python)
    endpoint = f"127.0.0.1:{free_port()}"
    report = directory / "report.xml"
    report.unlink(missing_ok=True)
    broker = ServedBroker(directory / FOLDER / "data", arguments=["--sqs", endpoint], http=False)
    _use_endpoint(tree, f"http://{endpoint}")
    try:
        broker.start()
        code, output = run_command(
            [
                *(python, "-m", "pytest", "-q", "--tb=short", "--timeout", str(TEST_LIMIT_S)),
                *("--junitxml", report),
                *(f"tests/test_sqs/{name}" for name in (FILES if only is None else sorted(only))),
            ],
            log=directory / "tests.log",
            limit_s=LIMIT_S,
            directory=tree,
            environment={
                "AWS_ENDPOINT_URL_SQS": f"http://{endpoint}",
                "AWS_ACCESS_KEY_ID": "any",
                "AWS_SECRET_ACCESS_KEY": "any",
                "AWS_DEFAULT_REGION": "us-east-1",
                "TEST_SERVER_MODE": "true",
            },
        )
    finally:
        broker.kill()
    if code not in _ENDED:
        raise RuntimeError(f"pytest ended with {code}:\n{output[-2000:]}")
    return outcomes_in(report)


def _install(directory: Path, tree: Path, python: Path) -> None:
    """An environment with moto, and a tree with its tests."""
    log = directory / "install.log"
    for made in (tree, directory / "venv", directory / "source"):
        shutil.rmtree(made, ignore_errors=True)
    checked([sys.executable, "-m", "venv", directory / "venv"], log=log, limit_s=INSTALL_LIMIT_S)
    pip: list[str | Path] = [python, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    constraints: list[str | Path] = ["--constraint", ROOT / "constraints.txt"]
    checked([*pip, "install", *constraints, *_NEEDED], log=log, limit_s=INSTALL_LIMIT_S)
    source: list[str | Path] = [
        "--no-deps",
        "--no-binary",
        ":all:",
        "--dest",
        directory / "source",
        f"moto=={VERSION}",
    ]
    checked([*pip, "download", *source], log=log, limit_s=INSTALL_LIMIT_S)
    top = f"moto-{VERSION}/tests"
    wanted = {f"{top}/__init__.py", *(f"{top}/test_sqs/{name}" for name in ("__init__.py", *FILES))}
    (tree / "tests" / "test_sqs").mkdir(parents=True)
    with tarfile.open(directory / "source" / f"moto-{VERSION}.tar.gz") as archive:
        for name in sorted(wanted):
            content = archive.extractfile(name)
            assert content is not None
            (tree / "tests" / name.removeprefix(f"{top}/")).write_bytes(content.read())
    shutil.copyfile(Path(__file__).with_name("moto_conftest.py"), tree / "conftest.py")
    (tree / "pytest.ini").write_text("[pytest]\nmarkers =\n    aws_verified\n    requires_docker\n")


def _use_endpoint(tree: Path, url: str) -> None:
    """The tests have the address of their server as a constant."""
    note = tree / ".endpoint"
    old = note.read_text() if note.exists() else _THEIR_SERVER
    for file in (tree / "tests" / "test_sqs").glob("*.py"):
        file.write_text(file.read_text().replace(old, url))
    note.write_text(url)


def outcomes_in(report: Path) -> Outcomes:
    """Of each test in pytest's report in the format of JUnit."""
    found: Outcomes = {}
    for case in ElementTree.parse(report).iter("testcase"):
        name = f"{case.get('classname', '').rpartition('.')[2]}.py::{case.get('name')}"
        results = {child.tag for child in case}
        if results & {"failure", "error"}:
            found[name] = Outcome.FAILED
        elif found.get(name) is not Outcome.FAILED:  # a test and its fixtures may have one entry each
            found[name] = Outcome.SKIPPED if "skipped" in results else Outcome.PASSED
    return found


MOTO = Suite("moto", VERSION, (), run, "one broker, its SQS endpoint; moto's tests of its SQS")
