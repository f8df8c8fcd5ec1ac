"""What tests share: waiting for conditions, free ports, a broker in a process of its own, tools."""
