"""The `mansio` command line. One module per command; modules that are slow to import are imported by the commands that
need them.
"""
