"""etcd client: the part of etcd's public interface that Mansio uses.

The package contains the connections to etcd and the interpretation of failed calls. Only this package uses gRPC. It is
imported only in a cluster, because grpcio and protobuf are optional dependencies.

Invariants:
* Every read is linearizable, every call has a deadline, every wait and every queue has a limit.
* A transaction whose response was lost raises `AmbiguousOutcome`. After any other error it was not executed.
* A client uses one endpoint as long as that endpoint responds; then it switches to the next one.
* A watch resumes after the last event that it returned, also at another endpoint or after a restart of etcd.

Interface: https://etcd.io/docs/v3.5/learning/api/ and https://etcd.io/docs/v3.5/dev-guide/api_reference_v3/
"""

from __future__ import annotations

from mansio.host.extras import missing_extra
from mansio.host.grpc_environment import set_grpc_environment

set_grpc_environment()

try:
    import google.protobuf  # noqa: F401 - only whether it is there
    import grpc  # noqa: F401 - the same
except ImportError:
    raise missing_extra("cluster") from None
