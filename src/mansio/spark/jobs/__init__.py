"""Jobs of `mansio pipeline`, one module per job. They run on Spark, except `lag`, `maintain` and `replay`.

The job `mirror` is in `mansio.spark.mirroring`.
"""
