"""etcd member that a broker (or `mansio dev-cluster`) starts and supervises.

`executable` finds the program and checks its version, `command` builds its command line, `child_process` is a process
that ends with its parent, `member` supervises it.
"""
