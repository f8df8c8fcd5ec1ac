"""Early hand-over: the session of a killed broker ends before its lease does."""
