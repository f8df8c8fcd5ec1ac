"""Mansio beside other queues, on the same workloads, in the same run: `make bench-peers`.

One small file per peer says how to start its server and how its client publishes, takes, and has records delivered one
by one; `workloads` measures all of them alike, `syncs` counts the fsyncs behind an acknowledgement, `table` compares
equals with equals.
"""
