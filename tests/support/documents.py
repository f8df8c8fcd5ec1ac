"""Names and examples in the documents, for the tests that compare them with brokers."""

from __future__ import annotations

import re
from typing import Final, NamedTuple

from support.paths import ROOT

EXAMPLE: Final = re.compile(
    r"^<!-- example: (?P<name>\S+) -->\n```(?P<language>\w+)\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL
)

SHOWN: Final = re.compile(r"^```text\n(.*?)^```$", re.MULTILINE | re.DOTALL)
VARYING: Final = (
    (re.compile(r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d[\d.]*(?:Z|[+-]\d\d:\d\d)?"), "TIME"),
    (re.compile(r"\b[0-9a-f]{8}(?:-?[0-9a-f]{4}){3}-?[0-9a-f]{12}\b"), "ID"),
    (re.compile(r"\b\d+(?:\.\d+)? ?(?:s|ms)\b"), "DURATION"),
    (re.compile(r"(?<=epoch )\d+"), "N"),
    (re.compile(r"[ \t]+"), " "),
)
"""What differs between two runs of an example: pattern -> what it is replaced by before a comparison."""


class Example(NamedTuple):
    """A marked block of a document. `shown`: the output that the document shows before its next example."""

    name: str
    language: str
    code: str
    shown: str | None = None


def examples(document: str) -> dict[str, Example]:
    """The marked examples of a document, in their order."""
    text = (ROOT / document).read_text()
    matches = list(EXAMPLE.finditer(text))
    names = [match["name"] for match in matches]
    assert len(set(names)) == len(names), f"{document}: two examples have one name: {names}"
    ends = [*(match.start() for match in matches[1:]), len(text)]
    found = {}
    for match, end in zip(matches, ends, strict=True):
        output = SHOWN.search(text, match.end(), end)
        found[match["name"]] = Example(**match.groupdict(), shown=output and output[1])
    return found


def lines_to_compare(output: str) -> list[str]:
    """The lines of an output without what differs from run to run: times, ids, durations, widths of columns."""
    for pattern, replacement in VARYING:
        output = pattern.sub(replacement, output)
    return [line.strip() for line in output.splitlines() if line.strip()]


def metrics_of_a_cluster(operations: str) -> set[str]:
    """The metrics that docs/how-to/operations.md lists as those that only a cluster's broker has."""
    _, _, table = operations.partition("In a cluster also these")
    table, _, _ = table.partition("Counters start at zero")
    return set(re.findall(r"\bmansio_[a-z_]+", table))
