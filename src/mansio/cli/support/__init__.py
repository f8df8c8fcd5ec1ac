"""Options, formatting and signals shared by the commands."""
