"""The member of etcd that a broker (or `mansio dev-cluster`) starts and looks after.

`binary` finds the program and judges its version, `command` writes its command line, `child` is a process that ends
with us, `health` asks a member how it is, `member` is the one that is looked after.
"""
