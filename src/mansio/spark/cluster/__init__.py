"""Check of a Spark cluster before a job starts: Python, packages, brokers and shared directories on every worker.

`check` runs `probe` on each worker; `problems` compares the reports with the driver's.
"""
