"""Implementations of the ports of `mansio.ports` on the operating system: disk, clock, threads, event loop."""
