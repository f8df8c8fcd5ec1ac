"""A client of etcd: what Mansio needs of etcd's public interface, and nothing else.

Owns the connections to etcd and what a failed call means. Nothing outside this package and `etcd_store` knows gRPC.
It is imported in cluster mode only: grpcio and protobuf are an extra.

Always true:
* every read is linearizable, every call has a deadline, every wait and every queue an end;
* a transaction whose answer was lost raises `Ambiguous`; any other error of a transaction means that it did not happen;
* a client stays with one endpoint while that answers, and moves to the next one when it does not;
* a watch goes on from the last event it has shown, across endpoints, restarts and lost connections.

Interface: https://etcd.io/docs/v3.5/learning/api/ and https://etcd.io/docs/v3.5/dev-guide/api_reference_v3/
"""

from __future__ import annotations

import os

from mansio.errors import ConfigError

os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # else its core writes lines of its own among ours

try:
    import google.protobuf  # noqa: F401 - only whether it is there
    import grpc  # noqa: F401 - the same
except ImportError:
    raise ConfigError(
        "a cluster needs grpcio and protobuf: pip install 'mansio[cluster]' brings them"
    ) from None
