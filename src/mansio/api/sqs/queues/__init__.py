"""Queues with the behaviour of Amazon SQS: each is one topic and one share group."""
