"""etcd client: the part of etcd's public interface that Mansio uses.

Contains the connections to etcd and the interpretation of failed calls. gRPC is used in this package only. It is
imported in cluster mode only: grpcio and protobuf are an optional dependency.

Invariants:
* Every read is linearizable, every call has a deadline, every wait and every queue has a limit.
* A transaction whose response was lost raises `Ambiguous`; any other error of a transaction means that it was not
  executed.
* A client uses one endpoint as long as that responds, and switches to the next one when it does not.
* A watch resumes after the last event that it returned, across endpoints, restarts and lost connections.

Interface: https://etcd.io/docs/v3.5/learning/api/ and https://etcd.io/docs/v3.5/dev-guide/api_reference_v3/
"""

from __future__ import annotations

import os

from mansio.host.extras import missing_extra

os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # otherwise its core writes to stderr

try:
    import google.protobuf  # noqa: F401 - only whether it is there
    import grpc  # noqa: F401 - the same
except ImportError:
    raise missing_extra("cluster") from None
