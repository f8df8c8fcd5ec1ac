"""`mansio pipeline`: jobs on Spark."""
