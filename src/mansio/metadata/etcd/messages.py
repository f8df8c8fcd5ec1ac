"""gRPC methods and messages of etcd, and their conversion from and to the types of the metadata store.

`LeaseKeepAlive` is a stream in etcd's interface. A stream with one request has the same wire format as a unary call, so
`KEEP_ALIVE` is used as a unary call, which has a deadline.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Generic, NamedTuple, TypeVar

from mansio.errors import StorageError
from mansio.metadata.etcd import rpc_pb2 as rpc
from mansio.metadata.metadata_store import Compare, Delete, Entry, Event, Put

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

RequestT = TypeVar("RequestT")
ResponseT = TypeVar("ResponseT")


class Method(NamedTuple, Generic[RequestT, ResponseT]):
    """One gRPC method: its path, and the functions that serialize requests and parse responses."""

    path: str
    write: Callable[[RequestT], bytes]
    read: Callable[[bytes], ResponseT]


RANGE: Final = Method(
    "/etcdserverpb.KV/Range", rpc.RangeRequest.SerializeToString, rpc.RangeResponse.FromString
)
TXN: Final = Method("/etcdserverpb.KV/Txn", rpc.TxnRequest.SerializeToString, rpc.TxnResponse.FromString)
WATCH: Final = Method(
    "/etcdserverpb.Watch/Watch", rpc.WatchRequest.SerializeToString, rpc.WatchResponse.FromString
)
GRANT: Final = Method(
    "/etcdserverpb.Lease/LeaseGrant",
    rpc.LeaseGrantRequest.SerializeToString,
    rpc.LeaseGrantResponse.FromString,
)
REVOKE: Final = Method(
    "/etcdserverpb.Lease/LeaseRevoke",
    rpc.LeaseRevokeRequest.SerializeToString,
    rpc.LeaseRevokeResponse.FromString,
)
KEEP_ALIVE: Final = Method(
    "/etcdserverpb.Lease/LeaseKeepAlive",
    rpc.LeaseKeepAliveRequest.SerializeToString,
    rpc.LeaseKeepAliveResponse.FromString,
)
AUTHENTICATE: Final = Method(
    "/etcdserverpb.Auth/Authenticate",
    rpc.AuthenticateRequest.SerializeToString,
    rpc.AuthenticateResponse.FromString,
)
STATUS: Final = Method(
    "/etcdserverpb.Maintenance/Status",
    rpc.StatusRequest.SerializeToString,
    rpc.StatusResponse.FromString,
)


def prefix_range(prefix: str) -> tuple[bytes, bytes]:
    """(first key, exclusive end) of the range of all keys with the prefix."""
    if not prefix:
        return b"\0", b"\0"  # etcd's notation for all keys
    begin = prefix.encode()
    return begin, begin[:-1] + bytes((begin[-1] + 1,))  # no byte of UTF-8 is 255


def encode_transaction(compares: Sequence[Compare], operations: Sequence[Put | Delete]) -> rpc.TxnRequest:
    """Request that executes all operations if all conditions are satisfied.

    etcd executes a transaction without any operation on the state of one member, which may be outdated. If `operations`
    is empty, a linearizable read is therefore added.
    """
    request = rpc.TxnRequest(compare=[each for compare in compares for each in _compares(compare)])
    if operations:
        request.success.extend(_operation(operation) for operation in operations)
    else:
        key = compares[0].key.encode() if compares else b"\0"
        read = rpc.RequestOp(request_range=rpc.RangeRequest(key=key, limit=1, keys_only=True))
        request.success.append(read)
        request.failure.append(read)
    return request


def _compares(compare: Compare) -> list[rpc.Compare]:
    key, found = compare.key.encode(), []
    if compare.mod_revision is not None:
        found.append(rpc.Compare(target=rpc.Compare.MOD, key=key, mod_revision=compare.mod_revision))
    if compare.create_revision is not None:
        found.append(rpc.Compare(target=rpc.Compare.CREATE, key=key, create_revision=compare.create_revision))
    return found


def _operation(operation: Put | Delete) -> rpc.RequestOp:
    key = operation.key.encode()
    if isinstance(operation, Put):
        put = rpc.PutRequest(key=key, value=operation.value, lease=operation.lease)
        return rpc.RequestOp(request_put=put)
    return rpc.RequestOp(request_delete_range=rpc.DeleteRangeRequest(key=key))


def decode_entry(found: rpc.KeyValue) -> Entry:
    """Convert a key with its value. Raises `StorageError` if the key is not UTF-8."""
    return Entry(_key(found.key), found.value, found.create_revision, found.mod_revision)


def decode_events(changes: Iterable[rpc.Event], from_revision: int) -> list[Event]:
    """Convert events; those before `from_revision` are left out. Raises `StorageError` if a key is not UTF-8."""
    return [
        Event(
            _key(change.kv.key),
            None if change.type == rpc.Event.DELETE else change.kv.value,
            change.kv.create_revision,
            change.kv.mod_revision,
        )
        for change in changes
        if change.kv.mod_revision >= from_revision
    ]


def _key(key: bytes) -> str:
    try:
        return key.decode()
    except UnicodeDecodeError as error:
        raise StorageError(f"etcd contains an invalid key with Mansio's prefix: {key[:100]!r}") from error
