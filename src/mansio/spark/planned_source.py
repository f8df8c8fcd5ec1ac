"""Base class of data sources whose tasks need none of their options."""

from __future__ import annotations

from typing import Any

from pyspark.sql.datasource import DataSource


class PlannedSource(DataSource):
    """Data source that travels with its reader to the tasks, as Spark sends it, but without its options, which may
    contain a password. Before it has made a reader it is pickled with them, for other processes of the driver.
    """

    _is_planned = False

    def _begin_plan(self) -> None:
        """To be called by the methods that return readers."""
        self._is_planned = True

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "options": {}} if self._is_planned else self.__dict__
