"""Comparison of Mansio with other queues, with the same workloads in the same run: `make bench-peers`.

One module per peer starts its server and implements publishing, consuming and delivery record by record. `workloads`
measures all of them in the same way, `syncs` counts the fsyncs per acknowledgement, and `table` compares candidates of
equal durability.
"""
