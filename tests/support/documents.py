"""Names and examples in the documents, for the tests that compare them with brokers."""

from __future__ import annotations

import re


def metrics_of_a_cluster(operations: str) -> set[str]:
    """The metrics that docs/OPERATIONS.md says only a cluster's broker has."""
    _, _, table = operations.partition("In a cluster also these")
    table, _, _ = table.partition("Counters start at zero")
    return set(re.findall(r"\bmansio_[a-z_]+", table))
