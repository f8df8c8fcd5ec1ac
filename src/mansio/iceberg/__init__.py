"""Iceberg tables, accessed with pyiceberg and pyarrow: catalogs, commits, files and maintenance.

Needs neither Spark nor a broker. Two kinds of table use it: the archives of topics (`archive`) and the results of
pipelines (`result_table`).
"""
