"""Iceberg table of an archive, accessed with pyiceberg and pyarrow. Needs neither Spark nor a broker.

>>> from mansio.spark.iceberg.catalog import open_table
>>> table = open_table(None, "/data/warehouse", "flights")
>>> table.last_commit().offsets
"""
