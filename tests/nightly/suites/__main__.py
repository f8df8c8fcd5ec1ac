"""Run suites and compare them with what is expected: `python -m nightly.suites [--write] [NAME...]`.

Exit status 1 where a suite differs from its list or could not be run; a suite whose tool chain is missing is left
out and reported. `--write` records the results in `results.json`.
"""

from __future__ import annotations

import argparse
import shutil
import signal
import subprocess
import sys
import time

from nightly.suites.brokers import FOLDER, logs_with_exceptions
from nightly.suites.commands import TimeLimitExceeded, end_all
from nightly.suites.expected import Expected, compare
from nightly.suites.franz_go import FRANZ_GO
from nightly.suites.java_tools import JAVA_TOOLS
from nightly.suites.kafka_go import KAFKA_GO
from nightly.suites.librdkafka import LIBRDKAFKA
from nightly.suites.moto import MOTO
from nightly.suites.results import summary, write
from nightly.suites.sarama import SARAMA
from nightly.suites.suite import Outcome, Outcomes, Suite
from support.nightly_counts import leave
from support.paths import ROOT

SUITES = {suite.name: suite for suite in (FRANZ_GO, SARAMA, KAFKA_GO, LIBRDKAFKA, JAVA_TOOLS, MOTO)}


def outcomes_of(suite: Suite, expected: Expected) -> Outcomes:
    """The outcomes; a test that failed unexpectedly is run once more, with those that failed beside it."""
    shutil.rmtree(suite.directory / FOLDER, ignore_errors=True)
    for log in suite.directory.glob("*.log"):
        log.unlink()
    outcomes = suite.run(suite.directory, expected, None)
    again = compare(outcomes, expected).failures
    if again and suite.once_more:
        print(f"{suite.name}: once more: {' '.join(again)}", flush=True)
        outcomes |= suite.run(suite.directory, expected, frozenset(again))
    for log in logs_with_exceptions(suite.directory):
        outcomes[f"no exception in {log.name}"] = Outcome.FAILED
    return outcomes


def _terminated(*_: object) -> None:
    """Leave the brokers' contexts, so that they end."""
    end_all()
    sys.exit("terminated")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m nightly.suites", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(SUITES)}; default: all")
    parser.add_argument("--write", action="store_true", help="record the results")
    arguments = parser.parse_args()
    unknown = set(arguments.names) - set(SUITES)
    if unknown:
        parser.error(f"no such suite: {', '.join(sorted(unknown))}")
    commit = subprocess.run(
        ["git", "-C", ROOT, "log", "-1", "--format=%h", "--", "src/mansio"],
        capture_output=True,
        text=True,
        check=False,
    ).stdout.strip()
    signal.signal(signal.SIGTERM, _terminated)
    differs = False
    for name in arguments.names or SUITES:
        suite = SUITES[name]
        if missing := suite.missing_programs():
            print(f"{name} {suite.version}: not run, {' and '.join(missing)} missing", flush=True)
            continue
        began = time.monotonic()
        expected = Expected.of(name)
        try:
            outcomes = outcomes_of(suite, expected)
        except (RuntimeError, AssertionError, OSError, TimeLimitExceeded) as error:
            print(f"{name} {suite.version}: could not be run: {error}", flush=True)
            differs = True
            continue
        found = compare(outcomes, expected)
        entry = summary(suite, outcomes, expected, commit)
        failed, skipped = sum(entry["failed"].values()), sum(entry["skipped"].values())
        print(
            f"{name} {suite.version}: {entry['passed']} passed, {failed} failed, {skipped} skipped, "
            f"{time.monotonic() - began:.0f} s",
            flush=True,
        )
        for line in found.lines():
            print(f"  {line}", flush=True)
        leave(
            f"suite {name}",
            passed=entry["passed"],
            failed=failed,
            skipped=skipped,
            unexpected=len(found.lines()),
        )
        differs |= not found.as_expected
        if arguments.write:
            write({name: entry})
    sys.exit(1 if differs else 0)


if __name__ == "__main__":
    main()
