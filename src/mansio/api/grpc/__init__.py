"""gRPC API of a broker: `mansio.v1` (extra `grpc`)."""
