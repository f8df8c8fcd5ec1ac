"""Errors of archive tables. Each message is one line and contains the remedy."""

from __future__ import annotations

from mansio.errors import MansioError


class ArchiveError(MansioError):
    """Base of the errors of archive tables."""


class CatalogLocked(ArchiveError):
    """Another program holds the catalog's lock."""

    retriable = True


class CatalogUnavailable(ArchiveError):
    """The catalog does not respond, or responds with an error."""

    retriable = True


class TableNotFound(ArchiveError):
    """The catalog has no table of this topic."""


class NotAnArchiveTable(ArchiveError):
    """The table was not created by `mansio pipeline archive`, or belongs to another topic."""


class ConcurrentArchive(ArchiveError):
    """Another archive has committed to the table."""


class ArchiveGap(ArchiveError):
    """The batch starts above the table's offsets, so the records between would be missing permanently."""


class InvalidDataFiles(ArchiveError):
    """Data files, or rows for them, are not as the plan or their task states; they are not committed."""


class CommitConflict(ArchiveError):
    """Another commit changed the table first, in every attempt if there are several."""

    retriable = True


class TableChanged(ArchiveError):
    """Another program changed columns or partition spec of a table, or dropped it, while a batch for it was written."""


class IncompatibleSchema(ArchiveError):
    """The columns of a result cannot be written to the table."""


class NullKey(ArchiveError):
    """Rows of a batch have no key, and the pipeline ends at such rows."""


class StaleCheckpoint(ArchiveError):
    """The checkpoint of a pipeline is older than the table to which it writes."""
