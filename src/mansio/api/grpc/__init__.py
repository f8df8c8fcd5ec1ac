"""gRPC API of a broker: `mansio.v1` (extra `grpc`)."""

from mansio.host.grpc_environment import set_grpc_environment

set_grpc_environment()
