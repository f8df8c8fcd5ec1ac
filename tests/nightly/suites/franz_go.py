"""franz-go's client tests (package kgo): produce, consume, groups, share groups against one broker."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nightly.suites.brokers import one_broker
from nightly.suites.go_tests import go_test, module_copy
from nightly.suites.suite import Suite

if TYPE_CHECKING:
    from pathlib import Path

    from nightly.suites.expected import Expected
    from nightly.suites.suite import Outcomes

VERSION = "1.22.2"
RECORDS = 50_000
LIMIT_S = 1200

TESTS = frozenset(
    (
        "TestPing",
        "TestIssue1034",
        "TestShareGroup",
        "TestIssue325",
        "TestConsumeTopicRetrieval",
        "TestConsumeTopicRetrieval_Many",
        "TestConsumeRegex",
        "TestConsumeRegexShareSkipsInternal",
        "Test848RegexBrokerResolves",
        "TestIssue337",
        "TestDirectPartitionPurge",
        "TestIssue434",
        "TestAddRemovePartitions",
        "TestPauseIssue489",
        "TestPauseIssueOct2023",
        "TestIssue523",
        "TestIssue648",
        "TestIssue810",
        "TestIssue865",
        "TestIssueFetchLargerThanBrokerMaxReadBytes",
        "TestPooling",
        "TestGroupSimple",
        "TestHookPollStart",
        "TestConsumeMaxDecompressBatchBytes",
        "TestGroupETL",
        "TestClient_Produce",
        "TestIssue769",
        "TestIssue831",
        "TestClient_ProduceLargeMessages",
        "TestShareGroupETL",
        "TestShareGroupAckOnClose",
        "TestShareGroupOffsetsAdmin",
        "TestTxnEtl",
    )
)
"""Those that talk to a broker; the others of the package need none."""


def run(directory: Path, expected: Expected, only: frozenset[str] | None) -> Outcomes:
    module = directory / "module"
    if only is None:
        module = module_copy("github.com/twmb/franz-go", f"v{VERSION}", directory)
    with one_broker(directory) as broker:
        return go_test(
            module / "pkg" / "kgo",
            only if only is not None else TESTS - set(expected.skipped),
            log=directory / "tests.log",
            limit_s=LIMIT_S,
            environment={
                "KGO_SEEDS": broker.bootstrap_servers,
                "KGO_TEST_RF": "1",
                "KGO_TEST_RECORDS": str(RECORDS),
                "KGO_LOG_LEVEL": "none",
            },
        )


FRANZ_GO = Suite("franz-go", VERSION, ("go",), run, "one broker; the tests that talk to one")
