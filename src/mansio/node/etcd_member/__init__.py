"""etcd member that a broker, `mansio serve --processes` or `mansio dev-cluster` starts and supervises.

`executable` finds the etcd program and checks its version, `command` builds its command line, and `member` supervises
the etcd process.
"""
