"""The archive: an Iceberg table through pyiceberg, Parquet files through pyarrow; independent of Spark.

>>> from mansio.spark.iceberg.catalog import open_table
>>> table = open_table(None, "/data/warehouse", "flights")
>>> table.committed().offsets
"""
