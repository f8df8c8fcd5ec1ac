"""Authorization: access control lists, and what they allow."""
