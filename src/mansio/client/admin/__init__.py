"""Administrative client."""
