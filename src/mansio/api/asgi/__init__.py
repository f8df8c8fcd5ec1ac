"""Common parts of the protocols over HTTP: server, bounds of connections and bodies, checks, problem details."""
