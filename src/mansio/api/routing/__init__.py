"""Requests of HTTP, gRPC and SQS, routed to the broker that is responsible with the identity of the client."""
