"""Runs of foreign test suites are compared with their lists, and what a suite reports is read as it is meant."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from tools.compatibility import suite_tables

from nightly.suites.__main__ import SUITES
from nightly.suites.expected import Expected, compare
from nightly.suites.go_tests import leave_out
from nightly.suites.go_tests import parsed as parsed_go
from nightly.suites.java_tools import PROGRAMS, STEPS, program_of
from nightly.suites.librdkafka import BrokerTest, broker_tests
from nightly.suites.librdkafka import parsed as parsed_librdkafka
from nightly.suites.moto import outcomes_in
from nightly.suites.results import read, summary, write
from nightly.suites.suite import Outcome

if TYPE_CHECKING:
    from pathlib import Path

PASSED, FAILED, SKIPPED = Outcome.PASSED, Outcome.FAILED, Outcome.SKIPPED
EXPECTED = Expected(
    failed={"known": "a deviation", "gone": "another"},
    skipped={"left out": "TLS"},
    unsteady={"either": "a race"},
)


def test_a_run_that_matches_its_list_is_as_expected() -> None:
    for either in (PASSED, FAILED):
        found = compare({"known": FAILED, "gone": FAILED, "either": either, "fine": PASSED}, EXPECTED)
        assert found.as_expected
        assert found.lines() == []


def test_an_unexpected_failure_pass_or_skip_and_a_listed_test_that_did_not_run_are_reported() -> None:
    found = compare({"known": PASSED, "broken": FAILED, "left out": PASSED, "silent": SKIPPED}, EXPECTED)
    assert found.failures == ["broken"]
    assert found.passes == ["known", "left out"]
    assert found.skips == ["silent"]
    assert found.absent == ["gone"]
    assert not found.as_expected
    assert len(found.lines()) == 5


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ('[failed]\na = "x"\n[skipped]\na = "y"\n', "a is listed twice"),
        ('[failed]\na = ""\n', "a has no reason"),
        ('[falied]\na = "x"\n', "unknown table falied"),
    ],
)
def test_a_list_with_a_mistake_is_refused(tmp_path: Path, text: str, error: str) -> None:
    (tmp_path / "suite.toml").write_text(text)
    with pytest.raises(ValueError, match=error):
        Expected.of("suite", tmp_path)


def test_each_suite_has_a_list_and_a_place_in_the_results() -> None:
    for name in SUITES:
        Expected.of(name)
        assert name in read()


def test_only_top_level_tests_of_go_count_and_their_last_outcome_holds() -> None:
    events = [
        {"Action": "run", "Test": "TestA"},
        {"Action": "fail", "Test": "TestA/part"},
        {"Action": "fail", "Test": "TestA"},
        {"Action": "pass", "Test": "TestA"},
        {"Action": "skip", "Test": "TestB"},
        {"Action": "output", "Test": "TestC", "Output": "..."},
        {"Action": "fail"},
    ]
    lines = ["go: downloading", *map(json.dumps, events), '{"Action": "pa']
    assert parsed_go("\n".join(lines)) == {"TestA": PASSED, "TestB": SKIPPED}


def test_parts_of_go_tests_that_are_listed_as_skipped_are_left_out_and_no_others() -> None:
    assert leave_out(["TestA", "TestB"]) == []
    assert leave_out(["TestA", "TestB/x.y", "TestC/d"]) == ["-test.skip", r"^TestB$/^x\.y$|^TestC$/^d$"]


def test_a_moto_test_whose_fixture_fails_has_failed(tmp_path: Path) -> None:
    case = '<testcase classname="tests.test_sqs.test_sqs" name="test_'
    report = tmp_path / "report.xml"
    report.write_text(
        f'<testsuites><testsuite>{case}a[x]"/>{case}b"><failure/></testcase>{case}c"><skipped/></testcase>'
        f'{case}d"><error/></testcase>{case}d"/></testsuite></testsuites>'
    )
    assert outcomes_in(report) == {
        "test_sqs.py::test_a[x]": PASSED,
        "test_sqs.py::test_b": FAILED,
        "test_sqs.py::test_c": SKIPPED,
        "test_sqs.py::test_d": FAILED,
    }


def test_librdkafkas_tests_without_a_broker_and_of_other_scenarios_are_left_out() -> None:
    table = """
struct test tests[] = {
    {.name = "<MAIN>", .flags = TEST_F_LOCAL},
    _TEST(0000_unittests,
          TEST_F_LOCAL,
          _THRES(.ucpu = 100.0)),
    _TEST(0001_multiobj, 0),
    _TEST(0018_cgrp_term, 0, TEST_BRKVER(0, 9, 0, 0)),
#if WITH_SOCKEM
    _TEST(0049_consume_conn_close, TEST_F_SOCKEM, TEST_BRKVER(0, 9, 0, 0)),
#endif
    _TEST(0066_plugins,
          TEST_F_LOCAL | TEST_F_KNOWN_ISSUE_WIN32,
          .extra = "text, with (a comma)"),
    _TEST(0107_topic_recreate,
          0,
          TEST_BRKVER_TOPIC_ADMINAPI,
          .scenario = "noautocreate"),
    _TEST(0200_other, 0, .scenario = "elsewhere"),
    /* Manual tests */
    _TEST(8000_idle, TEST_F_MANUAL),
    {NULL}};
"""
    assert broker_tests(table) == [
        BrokerTest("0001_multiobj", "default"),
        BrokerTest("0018_cgrp_term", "default"),
        BrokerTest("0049_consume_conn_close", "default"),
        BrokerTest("0107_topic_recreate", "noautocreate"),
    ]


def test_a_librdkafka_test_that_never_ended_has_no_outcome() -> None:
    states = {"0001_a": "PASSED", "0002_b": "FAILED", "0003_c": "RUNNING", "0004_d": "SKIPPED"}
    report = {"tests": {name: {"name": name, "state": state} for name, state in states.items()}}
    assert parsed_librdkafka(json.dumps(report)) == {"0001_a": PASSED, "0002_b": FAILED, "0004_d": SKIPPED}


def test_every_step_of_the_java_tools_names_a_tool() -> None:
    assert {program_of(name) for name in STEPS} == set(PROGRAMS.values())


def test_recorded_results_keep_other_suites_and_earlier_figures_and_are_in_the_document(
    tmp_path: Path,
) -> None:
    path = tmp_path / "results.json"
    path.write_text(
        json.dumps({"sarama": {"version": "1", "before": "1 of 2"}, "other": {"version": "3", "before": "4"}})
    )
    outcomes = {"known": FAILED, "gone": FAILED, "new": FAILED, "fine": PASSED, "self": SKIPPED}
    entry = summary(SUITES["sarama"], outcomes, EXPECTED, "abc1234")
    write({"sarama": entry}, path)
    recorded = read(path)
    assert recorded["other"] == {"version": "3", "before": "4"}
    assert recorded["sarama"]["before"] == "1 of 2"
    assert recorded["sarama"]["passed"] == 1
    assert recorded["sarama"]["failed"] == {"a deviation": 1, "another": 1, "not expected": 1}
    assert recorded["sarama"]["skipped"] == {"TLS": 1, "not expected": 1}
    table = suite_tables(recorded)
    assert (
        "| abc1234 | 1 | 3: a deviation (1); another (1); not expected (1) | 2: TLS (1); not expected (1) |"
        in table
    )
    assert "| other 3 | 4 |" in table
