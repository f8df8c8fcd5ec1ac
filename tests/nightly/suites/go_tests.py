"""Test suites of Go modules: their tests, copied out of the module cache and compiled, run with `go tool test2json`."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

from nightly.suites.commands import TimeLimitExceeded, checked, copied, run
from nightly.suites.suite import Outcome

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from nightly.suites.suite import Outcomes

DOWNLOAD_LIMIT_S = 600
BUILD_LIMIT_S = 1200
LOCAL_TOOLS = {"GOTOOLCHAIN": "local", "CGO_ENABLED": "0"}


def module_copy(module: str, version: str, into: Path) -> Path:
    """The module's source as a directory that can be changed; downloaded where Go's cache does not have it."""
    log = into / "go.log"
    reported = checked(
        ["go", "mod", "download", "-json", f"{module}@{version}"],
        log=log,
        limit_s=DOWNLOAD_LIMIT_S,
        environment=LOCAL_TOOLS,
    )
    source = json.loads(reported[reported.index("{") :])["Dir"]
    copied(source, into / "module")
    return into / "module"


def tests_in(files: Iterable[Path]) -> list[str]:
    """The names of the top-level tests in these source files."""
    return sorted(
        name
        for file in files
        for name in re.findall(r"^func (Test\w+)\(\w+ \*testing\.T\)", file.read_text(), re.MULTILINE)
    )


def go_test(
    directory: Path,
    names: Iterable[str],
    *,
    log: Path,
    limit_s: float,
    environment: Mapping[str, str],
    flags: Iterable[str] = (),
    skipped: Iterable[str] = (),
) -> Outcomes:
    """The outcomes of these top-level tests of the package in `directory`, without the parts that `skipped` names.

    When the process ends before its time or is killed, the tests without an outcome are run again, each alone; what
    has no outcome then has failed.
    """
    wanted = sorted(names)
    setting = {**LOCAL_TOOLS, **environment}
    program = log.with_suffix(".program")
    build: list[str | Path] = ["go", "test", "-c", "-o", program, *flags, "."]
    checked(build, log=log, limit_s=BUILD_LIMIT_S, directory=directory, environment=setting)
    as_json: list[str | Path] = ["go", "tool", "test2json", program, "-test.v=test2json", "-test.timeout=0"]
    outcomes: Outcomes = {}
    for candidates in [wanted, *([name] for name in wanted)]:
        group = [name for name in candidates if name not in outcomes]
        if not group:
            continue
        command = [*as_json, "-test.run", f"^({'|'.join(group)})$", *leave_out(skipped)]
        limit = limit_s if group == wanted else limit_s / 4
        try:
            _, output = run(command, log=log, limit_s=limit, directory=directory, environment=setting)
        except TimeLimitExceeded as exceeded:
            output = exceeded.output
        outcomes |= {name: each for name, each in parsed(output).items() if name in group}
        if len(group) == 1:
            outcomes.setdefault(group[0], Outcome.FAILED)
    return outcomes


def leave_out(skipped: Iterable[str]) -> list[str]:
    """The option for what is part of a test, Test/part."""
    patterns = [
        "/".join(f"^{re.escape(level)}$" for level in name.split("/")) for name in skipped if "/" in name
    ]
    return ["-test.skip", "|".join(patterns)] if patterns else []


def parsed(text: str) -> Outcomes:
    """The last outcome of each top-level test in the output of `go tool test2json`."""
    words = {"pass": Outcome.PASSED, "fail": Outcome.FAILED, "skip": Outcome.SKIPPED}
    outcomes: Outcomes = {}
    for line in text.splitlines():
        if line.startswith("{"):
            try:
                event = json.loads(line)
            except ValueError:
                continue
            name, word = event.get("Test", ""), event.get("Action")
            if name and "/" not in name and word in words:
                outcomes[name] = words[word]
    return outcomes
