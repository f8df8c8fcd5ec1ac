"""Names and examples in the documents, for the tests that compare them with brokers."""

from __future__ import annotations

import re
from typing import Final, NamedTuple

from support.paths import ROOT

EXAMPLE: Final = re.compile(
    r"^<!-- example: (?P<name>\S+) -->\n```(?P<language>\w+)\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL
)


class Example(NamedTuple):
    """A marked block of a document."""

    name: str
    language: str
    code: str


def examples(document: str) -> dict[str, Example]:
    """The marked examples of a document, in their order."""
    found = [match.groupdict() for match in EXAMPLE.finditer((ROOT / document).read_text())]
    names = [fields["name"] for fields in found]
    assert len(set(names)) == len(names), f"{document}: two examples have one name: {names}"
    return {fields["name"]: Example(**fields) for fields in found}


def metrics_of_a_cluster(operations: str) -> set[str]:
    """The metrics that docs/how-to/operations.md lists as those that only a cluster's broker has."""
    _, _, table = operations.partition("In a cluster also these")
    table, _, _ = table.partition("Counters start at zero")
    return set(re.findall(r"\bmansio_[a-z_]+", table))
