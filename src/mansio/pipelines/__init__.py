"""Jobs of `mansio pipeline`, one module or package per job.

`archive`, `backfilling`, `compact`, `dlq`, `hot_keys`, `run`, `schema_check` and the maintenance of result tables run
on Spark. `erase`, `lag`, `maintain`, `mirroring` and `replay` run without: importing them needs no pyspark.
"""
