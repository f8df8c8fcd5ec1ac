"""The directories of the tests: unit tests start no process and no broker."""

from __future__ import annotations

import re

from support.paths import ROOT

CHECKS = ROOT / "tests" / "unit" / "checks"
STARTS_SOMETHING = re.compile(
    r"^\s*(?:import subprocess\b|import multiprocessing\b"
    r"|from support\.(?:process|client_fixtures|cluster|etcd|forked_serve) import"
    r"|.*\b(?:EmbeddedBroker|mansio\.Broker)\()",
    re.MULTILINE,
)


def test_unit_tests_start_no_process_and_no_broker() -> None:
    """Tests that do belong to `tests/component` or `tests/system`; those of the repository itself may run its tools."""
    found = [
        str(file.relative_to(ROOT))
        for file in sorted((ROOT / "tests" / "unit").rglob("*.py"))
        if CHECKS not in file.parents and STARTS_SOMETHING.search(file.read_text())
    ]
    assert found == []
