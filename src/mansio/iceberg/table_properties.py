"""Properties of the tables that Mansio creates. Tasks import this module, so it does not import pyiceberg."""

from __future__ import annotations

from typing import Final

QUERY_PROPERTY: Final = "mansio.query-id"
BATCH_PROPERTY: Final = "mansio.batch-id"
"""Keys of a snapshot's summary, and properties of an archive: Spark's query id and batch id."""
COMMIT_RETRIES_PROPERTY: Final = "commit.retry.num-retries"
"""Iceberg's property with the number of times that a writer repeats a commit after a conflict. 0 in archives, into
which no other program may write. Result tables do not have it, because it is valid for other writers, too.
"""
COMMON_PROPERTIES: Final = {
    "commit.manifest-merge.enabled": "true",
    "commit.manifest.min-count-to-merge": "20",
    "write.metadata.previous-versions-max": "5",
    "write.metadata.delete-after-commit.enabled": "true",
}
"""Properties of every table that Mansio creates."""
