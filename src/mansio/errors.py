"""Exception hierarchy with Kafka, gRPC and HTTP codes.

A class is one kind of failure with its code in each protocol: Kafka's error code, the gRPC status, the HTTP status, and
whether a retry can succeed. The message is one line of text; its default is the first line of the class's docstring.

Callers distinguish three families: `RequestError` (the request is invalid; the same request fails again), `Unavailable`
(the broker cannot process it now; retry after a metadata refresh) and `StorageError` (the disk failed, and the affected
log accepts no more writes).

Codes: https://kafka.apache.org/protocol.html#protocol_error_codes
"""

from __future__ import annotations

from typing import ClassVar, Final, Self


class MansioError(Exception):
    """Base class of all errors of Mansio. `str(error)` is one line."""

    kafka_code: ClassVar[int] = -1  # UNKNOWN_SERVER_ERROR
    grpc_status: ClassVar[str] = "UNKNOWN"
    http_status: ClassVar[int] = 500
    retriable: ClassVar[bool] = False
    record_errors: tuple[tuple[int, str | None], ...] = ()
    """Invalid records of a refused batch, as far as they are known: (index in the batch, reason) (KIP-467)."""

    def __init__(self, message: str = "") -> None:
        self.message: str = message or (type(self).__doc__ or type(self).__name__).partition("\n")[0]
        """One line."""
        super().__init__(self.message)


class WireError(MansioError):
    """The peer sent bytes that are not the Kafka protocol. The connection is closed."""

    kafka_code = 42  # INVALID_REQUEST
    grpc_status = "INVALID_ARGUMENT"
    http_status = 400


class FrameTooLarge(WireError):
    """The frame is larger than this listener accepts."""


class FrameStalled(WireError):
    """A large frame stalled while other connections wait for its memory."""


class RequestError(MansioError):
    """The request is invalid."""

    kafka_code = 42  # INVALID_REQUEST
    grpc_status = "INVALID_ARGUMENT"
    http_status = 400


class InvalidRequest(RequestError):
    """The request is inconsistent or has an invalid field."""


class SchemaRegistryRefusal(RequestError):
    """The schema registry refuses the request."""

    code: int = 422
    """Error code of the registry's REST API: a status of HTTP, or one with two more digits."""

    @classmethod
    def of(cls, code: int, message: str) -> Self:
        """The error with a code of the REST API."""
        error = cls(message)
        error.code = code
        return error


class InvalidReceipt(InvalidRequest):
    """The text is not a receipt of a leased record."""


class UnsupportedVersion(RequestError):
    """This API or version is not supported."""

    kafka_code = 35
    grpc_status = "UNIMPLEMENTED"


class FeatureNotFinalized(UnsupportedVersion):
    """The cluster cannot store this before its upgrade is finalized: run 'mansio cluster finalize'."""

    grpc_status = "FAILED_PRECONDITION"
    http_status = 409


class DelaysNotEnabled(InvalidRequest):
    """The topic does not accept delayed records."""


class DeduplicationNotEnabled(InvalidRequest):
    """The topic has no deduplication window."""


class PrioritiesNotEnabled(InvalidRequest):
    """The topic has no priorities."""


class InvalidSchedule(InvalidRequest):
    """The schedule has an invalid cron expression, interval or time zone."""


class ResourceNotFound(RequestError):
    """The resource does not exist."""

    kafka_code = 91
    grpc_status = "NOT_FOUND"
    http_status = 404


class DuplicateResource(RequestError):
    """The resource exists already, or the request names it more than once."""

    kafka_code = 92
    grpc_status = "ALREADY_EXISTS"
    http_status = 409


class ScheduleNotFound(ResourceNotFound):
    """There is no such schedule."""


class ScheduleAlreadyExists(DuplicateResource):
    """There is another schedule with this name."""


class DelayNotOffered(UnsupportedVersion):
    """The broker, for example Apache Kafka, does not support retry delays. Call `retry` without `after`."""


class CorruptMessage(RequestError):
    """The record batch does not match its checksum or its own lengths."""

    kafka_code = 2


class DecompressionFailed(CorruptMessage):
    """The records of the batch cannot be decompressed, although its checksum matches."""


class InvalidRecord(RequestError):
    """A record in the batch is invalid; the whole batch was refused."""

    kafka_code = 87


class DecompressedTooLarge(InvalidRecord):
    """The records of the batch take too many bytes when decompressed."""


class UnsupportedCompression(RequestError):
    """The codec is unknown, or not allowed in this version of the request."""

    kafka_code = 76


class UnsupportedMessageFormat(RequestError):
    """Only record batch format 2 is accepted."""

    kafka_code = 43


UNREADABLE_CONTENT: Final = (DecompressionFailed, InvalidRecord, UnsupportedCompression)
"""Errors of the content of a batch with a valid checksum: a client has stored it so, and the log is intact."""

DAMAGED_BATCH: Final = (CorruptMessage, UnsupportedMessageFormat)
"""Errors of the checksum, the lengths or the format of a batch: it is not as a client has stored it. Test for
`UNREADABLE_CONTENT` first, because `DecompressionFailed` is a `CorruptMessage`."""

UNREADABLE_OR_DAMAGED: Final = (*DAMAGED_BATCH, *UNREADABLE_CONTENT)
"""Errors after which a reader that cannot repair a batch goes on behind it."""


class MessageTooLarge(RequestError):
    """The batch is larger than max.message.bytes."""

    kafka_code = 10
    grpc_status = "RESOURCE_EXHAUSTED"
    http_status = 413


class InvalidRequiredAcks(RequestError):
    """acks must be 0, 1 or -1 (all)."""

    kafka_code = 21


class InvalidTimestamp(RequestError):
    """The timestamp is out of the accepted range."""

    kafka_code = 32


class OffsetOutOfRange(RequestError):
    """The offset is not in the log: below its start or above its end."""

    kafka_code = 1
    grpc_status = "OUT_OF_RANGE"
    http_status = 416


class UnknownTopicOrPartition(RequestError):
    """This broker has no such topic or partition."""

    kafka_code = 3
    grpc_status = "NOT_FOUND"
    http_status = 404
    retriable = True


class UnknownTopicId(UnknownTopicOrPartition):
    """No topic has this id."""

    kafka_code = 100


class InconsistentTopicId(RequestError):
    """The topic's name and id do not match."""

    kafka_code = 103
    retriable = True


class TopicAlreadyExists(RequestError):
    """A topic with this name exists already."""

    kafka_code = 36
    grpc_status = "ALREADY_EXISTS"
    http_status = 409


class InvalidTopic(RequestError):
    """The topic name is invalid, or clients may not write to the topic."""

    kafka_code = 17


class InvalidPartitions(RequestError):
    """The number of partitions is invalid."""

    kafka_code = 37


class InvalidReplicationFactor(RequestError):
    """The replication factor is below 1 or above the number of brokers."""

    kafka_code = 38


class InvalidReplicaAssignment(RequestError):
    """The replica assignment names unknown brokers or is uneven."""

    kafka_code = 39


class InvalidConfig(RequestError):
    """A setting is unknown or its value is invalid."""

    kafka_code = 40


class PolicyViolation(RequestError):
    """A policy of this broker forbids the request."""

    kafka_code = 44
    http_status = 403


class AuthenticationFailed(RequestError):
    """The client and the broker did not authenticate each other; the same attempt fails again."""

    grpc_status = "UNAUTHENTICATED"
    http_status = 401


class UnsupportedSaslMechanism(AuthenticationFailed):
    """The listener does not offer this SASL mechanism."""

    kafka_code = 33


class IllegalSaslState(AuthenticationFailed):
    """The request is not allowed in the present state of the authentication."""

    kafka_code = 34


class SaslAuthenticationFailed(AuthenticationFailed):
    """The user or the password is wrong."""

    kafka_code = 58


class TlsFailed(AuthenticationFailed):
    """There is no TLS connection to the broker: the port, the protocol, a certificate or the name in it is wrong."""

    wrong: str = "protocol"
    """What is wrong: `protocol` (also where only one side uses TLS, or none although it is necessary), `certificate`,
    `name` (in the broker's certificate) or `client certificate`."""
    reason: str = ""
    """The message without what a client may do about it."""

    @classmethod
    def of(cls, wrong: str, reason: str, remedy: str = "") -> Self:
        """The error for what is wrong. `remedy`: what a client may do about it."""
        error = cls(f"{reason}; {remedy}" if remedy else reason)
        error.wrong, error.reason = wrong, reason
        return error


class AuthorizationFailed(RequestError):
    """The user is not allowed to do this."""

    grpc_status = "PERMISSION_DENIED"
    http_status = 403


class TopicAuthorizationFailed(AuthorizationFailed):
    """The user is not allowed to do this to the topic."""

    kafka_code = 29


class GroupAuthorizationFailed(AuthorizationFailed):
    """The user is not allowed to do this to the group."""

    kafka_code = 30


class SecurityDisabled(RequestError):
    """No authorizer is configured: every operation is allowed."""

    kafka_code = 54


class DelegationTokenAuthDisabled(RequestError):
    """The broker has no delegation tokens: it has no secrets key."""

    kafka_code = 61
    http_status = 403


class DelegationTokenNotFound(RequestError):
    """There is no such delegation token."""

    kafka_code = 62
    http_status = 404


class DelegationTokenOwnerMismatch(RequestError):
    """The user is neither the owner of the delegation token, nor one of its renewers."""

    kafka_code = 63
    http_status = 403


class DelegationTokenRequestNotAllowed(RequestError):
    """Delegation tokens are managed by clients with a password or certificate, on confidential connections."""

    kafka_code = 64
    http_status = 403


class DelegationTokenAuthorizationFailed(AuthorizationFailed):
    """The user is not allowed to create delegation tokens of this owner."""

    kafka_code = 65


class DelegationTokenExpired(RequestError):
    """The delegation token has expired."""

    kafka_code = 66
    http_status = 403


class InvalidPrincipalType(RequestError):
    """The type of a principal is not User."""

    kafka_code = 67


class UnacceptableCredential(RequestError):
    """The password, its salt or its number of iterations is not acceptable."""

    kafka_code = 93


class LogDirNotFound(RequestError):
    """The broker has no such data directory."""

    kafka_code = 57
    grpc_status = "NOT_FOUND"
    http_status = 404


class InvalidUpdateVersion(RequestError):
    """The feature cannot have this version (KIP-584)."""

    kafka_code = 95


class FeatureUpdateFailed(RequestError):
    """The feature could not be updated, because brokers registered meanwhile (KIP-584)."""

    kafka_code = 96


class OutOfOrderSequence(RequestError):
    """The producer's sequence number does not follow the last one."""

    kafka_code = 45


class InvalidProducerEpoch(RequestError):
    """The producer's epoch is older than the current one."""

    kafka_code = 47


class UnknownProducerId(RequestError):
    """The producer id is unknown in this partition and the sequence does not start at 0."""

    kafka_code = 59


class InvalidTxnState(RequestError):
    """The transaction is in a state in which the request is not possible."""

    kafka_code = 48
    grpc_status = "FAILED_PRECONDITION"
    http_status = 409


class TransactionCoordinatorFenced(RequestError):
    """A later transaction coordinator has written a marker for this producer."""

    kafka_code = 52


class TransactionalIdAuthorizationFailed(AuthorizationFailed):
    """The user is not allowed to do this with the transactional id."""

    kafka_code = 53


class TransactionalIdMissing(TransactionalIdAuthorizationFailed):
    """A transactional batch is in a request that names no transactional id."""


class InvalidProducerIdMapping(RequestError):
    """The producer id does not belong to this transactional id."""

    kafka_code = 49


class OperationNotAttempted(RequestError):
    """Nothing was changed, because another part of the request failed."""

    kafka_code = 55


class InvalidTransactionTimeout(RequestError):
    """The timeout of the transaction is longer than the broker allows."""

    kafka_code = 50


class ProducerFenced(RequestError):
    """A newer producer has the same transactional id."""

    kafka_code = 90


class TransactionalIdNotFound(RequestError):
    """There is no such transactional id."""

    kafka_code = 105
    grpc_status = "NOT_FOUND"
    http_status = 404


class TransactionAbortable(RequestError):
    """The request is not possible in the transaction; the producer can abort the transaction and go on (KIP-890)."""

    kafka_code = 120


class TransactionAborted(MansioError):
    """The transaction of the record was aborted."""

    http_status = 409
    grpc_status = "ABORTED"


class TransactionTimedOut(MansioError):
    """The transaction was open for longer than its timeout, so the coordinator aborted it."""

    http_status = 409
    grpc_status = "ABORTED"


class TransactionOutcomeUnknown(MansioError):
    """The coordinator did not answer in time: the transaction is committed or aborted as a whole, which is unknown."""

    http_status = 504
    grpc_status = "DEADLINE_EXCEEDED"


class OffsetMetadataTooLarge(RequestError):
    """The metadata string of an offset commit is too long."""

    kafka_code = 12


class InvalidGroupId(RequestError):
    """The group id is not valid."""

    kafka_code = 24


class IllegalGeneration(RequestError):
    """The generation is not the group's current one."""

    kafka_code = 22
    grpc_status = "FAILED_PRECONDITION"
    http_status = 409


class InconsistentGroupProtocol(RequestError):
    """The member's protocols do not match those of the group."""

    kafka_code = 23


class UnknownMember(RequestError):
    """The group has no such member."""

    kafka_code = 25
    grpc_status = "FAILED_PRECONDITION"
    http_status = 409


class InvalidSessionTimeout(RequestError):
    """The session timeout is outside the allowed range."""

    kafka_code = 26


class MemberIdRequired(RequestError):
    """Join again with the member id in this response."""

    kafka_code = 79


class FencedInstanceId(RequestError):
    """Another member joined with the same group.instance.id."""

    kafka_code = 82


class FencedMemberEpoch(RequestError):
    """The member's epoch differs from the coordinator's; the member has to join again (KIP-848)."""

    kafka_code = 110
    grpc_status = "FAILED_PRECONDITION"
    http_status = 409


class UnreleasedInstanceId(RequestError):
    """Another member with this group.instance.id has not left yet (KIP-848)."""

    kafka_code = 111
    grpc_status = "FAILED_PRECONDITION"
    http_status = 409


class UnsupportedAssignor(RequestError):
    """The coordinator has no assignor with this name (KIP-848)."""

    kafka_code = 112


class StaleMemberEpoch(RequestError):
    """The request has an older epoch of the member; retry after the next heartbeat."""

    kafka_code = 113
    grpc_status = "FAILED_PRECONDITION"
    http_status = 409


class InvalidRegularExpression(RequestError):
    """The subscription is no valid RE2 regular expression (KIP-848)."""

    kafka_code = 128


class InvalidRecordState(RequestError):
    """A record is not acquired by the acknowledging member: its lock expired, or another member has it (KIP-932)."""

    kafka_code = 121
    grpc_status = "FAILED_PRECONDITION"
    http_status = 409


class LeaseLost(InvalidRecordState):
    """The record is not leased by this member any more, because its lease expired or the connection over which it was
    leased ended. The broker delivers the record again, to any member. If only the response to an acknowledgement was
    lost, the broker may have stored the acknowledgement."""


class FetchSessionNotFound(RequestError):
    """The broker has no such fetch session (KIP-227)."""

    kafka_code = 70
    grpc_status = "FAILED_PRECONDITION"
    http_status = 409


class InvalidFetchSessionEpoch(RequestError):
    """The fetch session epoch of the request is not the expected one (KIP-227)."""

    kafka_code = 71
    grpc_status = "FAILED_PRECONDITION"
    http_status = 409


class FetchSessionTopicIdError(RequestError):
    """A fetch session has topic ids, and the request names topics (KIP-516)."""

    kafka_code = 106
    grpc_status = "FAILED_PRECONDITION"
    http_status = 409


class ShareSessionNotFound(RequestError):
    """The broker has no such share session (KIP-932)."""

    kafka_code = 122
    grpc_status = "FAILED_PRECONDITION"
    http_status = 409


class InvalidShareSessionEpoch(RequestError):
    """The share session epoch of the request is not the expected one (KIP-932)."""

    kafka_code = 123
    grpc_status = "FAILED_PRECONDITION"
    http_status = 409


class FencedStateEpoch(RequestError):
    """The state of the share partition has a newer epoch (KIP-932)."""

    kafka_code = 124
    grpc_status = "FAILED_PRECONDITION"
    http_status = 409


class GroupMaxSizeReached(RequestError):
    """The group has its maximum number of members."""

    kafka_code = 81
    http_status = 409


class NonEmptyGroup(RequestError):
    """The group still has members."""

    kafka_code = 68
    http_status = 409


class GroupIdNotFound(RequestError):
    """There is no such group."""

    kafka_code = 69
    grpc_status = "NOT_FOUND"
    http_status = 404


class GroupSubscribedToTopic(RequestError):
    """A member of the group is subscribed to the topic."""

    kafka_code = 86
    http_status = 409


class ElectionNotNeeded(RequestError):
    """The partition already has the leader that would be elected."""

    kafka_code = 84


class BrokerIdNotRegistered(RequestError):
    """No broker with this id is registered."""

    kafka_code = 102
    http_status = 404


class NoReassignmentInProgress(RequestError):
    """No reassignment of this partition is in progress."""

    kafka_code = 85


class UnknownLeaderEpoch(RequestError):
    """The leader epoch in the request is newer than this broker's."""

    kafka_code = 75
    retriable = True


class FencedLeaderEpoch(RequestError):
    """The leader epoch in the request is older than this broker's."""

    kafka_code = 74
    retriable = True


class Unavailable(MansioError):
    """The broker cannot process the request now; a retry can succeed."""

    kafka_code = 8  # BROKER_NOT_AVAILABLE
    grpc_status = "UNAVAILABLE"
    http_status = 503
    retriable = True


class ConnectionLost(Unavailable):
    """The connection to the broker ended before the response arrived."""


class BrokerUnreachable(ConnectionLost):
    """There is no connection to the broker, so that nothing was sent."""


class RequestTimedOut(Unavailable):
    """The request timed out; it may or may not have been processed."""

    kafka_code = 7
    grpc_status = "DEADLINE_EXCEEDED"
    http_status = 504


class LeaderNotAvailable(Unavailable):
    """The partition has no leader at present."""

    kafka_code = 5


class NotLeaderOrFollower(Unavailable):
    """This broker is not the leader of the partition."""

    kafka_code = 6


class CoordinatorLoadInProgress(Unavailable):
    """The coordinator is still loading."""

    kafka_code = 14


class ShareSessionLimitReached(Unavailable):
    """The broker has its maximum number of share sessions (KIP-932)."""

    kafka_code = 133


class CoordinatorNotAvailable(Unavailable):
    """The coordinator is not available."""

    kafka_code = 15


class NotCoordinator(Unavailable):
    """Another broker is the coordinator of this group."""

    kafka_code = 16


class UnstableOffsetCommit(Unavailable):
    """A transaction that is not ended yet has committed an offset of this partition (KIP-447)."""

    kafka_code = 88


class ConcurrentTransactions(Unavailable):
    """The producer's last transaction is being completed; try again."""

    kafka_code = 51


class RebalanceInProgress(Unavailable):
    """The group is rebalancing; join again."""

    kafka_code = 27


class NotController(Unavailable):
    """Another broker is the controller."""

    kafka_code = 41


class ThrottlingQuotaExceeded(Unavailable):
    """A quota is used up for now; a later attempt may succeed (KIP-599)."""

    kafka_code = 89
    http_status = 429
    grpc_status = "RESOURCE_EXHAUSTED"


class ConcurrentChange(Unavailable):
    """Another change of the same metadata was committed first."""

    grpc_status = "ABORTED"
    http_status = 409


class PreferredLeaderNotAvailable(Unavailable):
    """The preferred leader of the partition is not available."""

    kafka_code = 80


class EligibleLeadersNotAvailable(Unavailable):
    """No replica of the partition can become its leader."""

    kafka_code = 83


class NotEnoughReplicas(Unavailable):
    """Fewer in-sync replicas than min.insync.replicas: nothing was written."""

    kafka_code = 19


class NotEnoughReplicasAfterAppend(Unavailable):
    """Fewer in-sync replicas than min.insync.replicas after the append: the batch may still be committed."""

    kafka_code = 20


class OffsetNotAvailable(Unavailable):
    """The new leader does not know its high watermark yet (KIP-207)."""

    kafka_code = 78


class VerificationPending(OffsetNotAvailable):
    """Stored batches are being verified before their first delivery; the same read succeeds after that."""


class ClusterAuthorizationFailed(AuthorizationFailed):
    """The user is not allowed to do this to the cluster."""

    kafka_code = 31


class StaleBrokerEpoch(Unavailable):
    """The broker epoch in the request belongs to an earlier session of that broker (KIP-903)."""

    kafka_code = 77


class QueueFull(Unavailable):
    """The client's send buffer is full."""

    grpc_status = "RESOURCE_EXHAUSTED"
    http_status = 429


class StorageError(MansioError):
    """The broker's disk is full or failed, or the partition's data is damaged; see the broker's health."""

    kafka_code = 56
    grpc_status = "INTERNAL"
    http_status = 500


class DiskFull(StorageError):
    """The disk is full: nothing was written; the same request succeeds when there is space."""

    grpc_status = "RESOURCE_EXHAUSTED"
    http_status = 507


class DescriptorsExhausted(StorageError):
    """The broker has no free file descriptor: nothing was written; the same request succeeds when there is one."""

    grpc_status = "RESOURCE_EXHAUSTED"
    http_status = 503
    retriable = True


class LogFailed(StorageError):
    """A write or sync of this log failed; it accepts no more writes until the broker is restarted."""


class CorruptLog(StorageError):
    """Bytes on disk below the durable end do not match their checksum."""


class DamagedRange(CorruptLog):
    """Damaged batches with known limits: a reader can continue at `end_offset`."""

    first_offset: int = -1
    end_offset: int = -1


class MetadataCorrupt(StorageError):
    """The metadata file is damaged; the broker does not start with it."""


class DataDirectoryLocked(StorageError):
    """Another process has this data directory open."""


class ConfigError(MansioError):
    """A setting is unknown or its value is invalid."""

    kafka_code = 40
    grpc_status = "INVALID_ARGUMENT"
    http_status = 400


class MissingExtra(MansioError, ImportError):
    """A package of an optional extra is not installed. It is an `ImportError`, too."""


class ClientFailed(MansioError):
    """Unexpected exception in the client. Requests in progress may or may not have been executed."""


class UnsupportedPlatform(MansioError):
    """The operating system lacks what the operation needs."""


class DataLoss(MansioError):
    """Records that a query reads have been deleted."""

    http_status = 410
    next_offset: int | None = None
    """Offset at which the partition can be read further; None: not at all."""


class TopicRecreated(DataLoss):
    """The topic was deleted and created again: its offsets refer to other records now."""


class UnreadableRecords(MansioError):
    """Records that a consumer or query reads are damaged or invalid.

    Raised by a consumer, it has the `topic`, the `partition`, the first and the last offset, both inclusive, and the
    `reason`; in a query only the message has them (-1)."""

    topic: str = ""
    partition: int = -1
    first_offset: int = -1
    last_offset: int = -1
    reason: str = ""

    @classmethod
    def at(cls, topic: str, partition: int, first_offset: int, last_offset: int, reason: str) -> Self:
        """The error for these offsets of a partition, both inclusive."""
        error = cls(f"{topic}-{partition}: offsets {first_offset} to {last_offset} cannot be read: {reason}")
        error.topic, error.partition = topic, partition
        error.first_offset, error.last_offset, error.reason = first_offset, last_offset, reason
        return error


def _codes(root: type[MansioError]) -> dict[int, type[MansioError]]:
    found: dict[int, type[MansioError]] = {}
    for child in root.__subclasses__():
        for code, kind in _codes(child).items():
            found.setdefault(code, kind)
    if "kafka_code" in vars(root):
        found[root.kafka_code] = root
    return found


def error_for_code(code: int, message: str = "") -> MansioError:
    """The error of a Kafka error code; for an unknown code a `MansioError` that names it."""
    kind = BY_KAFKA_CODE.get(code)
    if kind is None:
        return MansioError(message or f"the broker answered with error code {code}")
    return kind(message)


BY_KAFKA_CODE: dict[int, type[MansioError]] = {
    **_codes(MansioError),
    42: InvalidRequest,
    8: Unavailable,
    56: StorageError,
    40: InvalidConfig,
    3: UnknownTopicOrPartition,
}
"""Kafka error code -> class of the error."""
