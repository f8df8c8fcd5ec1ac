"""A function of the user's, called for rows of Spark: a row that fails becomes a row with an error.

>>> from mansio.spark import work
>>> done = work.apply(images, resize, schema="value binary")
>>> done.where("error IS NOT NULL").select("offset", "error").show()
"""

from mansio.spark.work.apply import apply
from mansio.spark.work.errors import ProcessDied, Reject, Retry, RowErrors, TimedOut

__all__ = ["ProcessDied", "Reject", "Retry", "RowErrors", "TimedOut", "apply"]
