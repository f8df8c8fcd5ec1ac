"""The archive's table: Iceberg through pyiceberg, Parquet through pyarrow. Nothing here knows Spark or a broker.

>>> from mansio.spark.iceberg.catalog import open_table
>>> table = open_table(None, "/data/warehouse", "flights")
>>> table.committed().offsets
"""
