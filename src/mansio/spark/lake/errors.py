"""What can go wrong with a table, each as one clear line that says what to do."""

from __future__ import annotations

from mansio.errors import MansioError


class LakeError(MansioError):
    """Something is wrong with the archive's table."""


class LakeNotInstalled(LakeError):
    """The archive needs pyiceberg and pyarrow: `pip install 'mansio[lake]'` brings them."""


class CatalogLocked(LakeError):
    """Another program holds the catalog's lock."""

    retriable = True


class CatalogUnavailable(LakeError):
    """The catalog does not answer."""

    retriable = True


class TableNotFound(LakeError):
    """There is no table of this topic in the catalog."""


class ForeignTable(LakeError):
    """The table was not made by `mansio pipeline archive`, or not for this topic."""


class ForeignCommit(LakeError):
    """Another archive has written into the table meanwhile."""


class ArchiveGap(LakeError):
    """The batch starts above what the table has: the records between would be missing for good."""


class InvalidParts(LakeError):
    """The files of a batch do not hold what was planned for it."""


class CommitConflict(LakeError):
    """Other changes of the table kept coming first."""

    retriable = True
