"""Iceberg table of an archive, through pyiceberg and pyarrow. Independent of Spark and of brokers.

>>> from mansio.spark.iceberg.catalog import open_table
>>> table = open_table(None, "/data/warehouse", "flights")
>>> table.last_commit().offsets
"""
