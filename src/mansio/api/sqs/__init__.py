"""Endpoint for programs written for Amazon SQS: AWS JSON 1.0 and the older Query protocol."""
