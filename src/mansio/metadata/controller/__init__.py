"""The controller: elections, placement and failure detection."""
