"""Schema registry without I/O: subjects, their versions, the ids of schemas, and what may be changed."""
