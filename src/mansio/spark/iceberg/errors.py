"""What can go wrong with a table, each as one clear line that says what to do."""

from __future__ import annotations

from mansio.errors import MansioError


class ArchiveError(MansioError):
    """Something is wrong with the archive's table."""


class IcebergNotInstalled(ArchiveError):
    """The archive needs pyiceberg and pyarrow: `pip install 'mansio[lake]'` brings them."""


class CatalogLocked(ArchiveError):
    """Another program holds the catalog's lock."""

    retriable = True


class CatalogUnavailable(ArchiveError):
    """The catalog does not answer."""

    retriable = True


class TableNotFound(ArchiveError):
    """There is no table of this topic in the catalog."""


class NotAnArchiveTable(ArchiveError):
    """The table was not made by `mansio pipeline archive`, or not for this topic."""


class ConcurrentArchive(ArchiveError):
    """Another archive has written into the table meanwhile."""


class ArchiveGap(ArchiveError):
    """The batch starts above what the table has: the records between would be missing for good."""


class InvalidDataFiles(ArchiveError):
    """The files of a batch do not hold what was planned for it."""


class CommitConflict(ArchiveError):
    """Other changes of the table kept coming first."""

    retriable = True
