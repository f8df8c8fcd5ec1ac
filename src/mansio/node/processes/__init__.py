"""Broker processes that another process starts and supervises: those of `mansio serve --processes` and of
`mansio dev-cluster`.

`broker_process` runs one of them, and `restarts` decides whether it is restarted. Of a node with several processes,
`plan` has directories, ports and settings, `supervisor` runs them with an etcd member, `control_channel` connects each
of them with the supervisor, and `monitoring` merges their health and metrics.
"""
