"""Archives: Iceberg tables with the records of a topic.

>>> from mansio.iceberg.archive.table import open_table
>>> table = open_table(None, "/data/warehouse", "flights")
>>> table.last_commit().offsets
"""
