"""Real implementations of the ports: disk, clock, threads, event loop."""
