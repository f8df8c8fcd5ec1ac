"""etcd member that a broker (or `mansio dev-cluster`) starts and supervises.

`executable` finds the etcd program and checks its version, `command` builds its command line, `child_process` runs a
process that ends with its parent, and `member` supervises the etcd process.
"""
