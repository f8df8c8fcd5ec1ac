"""What the Makefile calls besides other people's programs: set-up, generated documents."""
