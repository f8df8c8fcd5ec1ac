"""Transactions over HTTP: list, describe, find hanging ones, abort, terminate (KIP-664)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Final

from pydantic import Field

from mansio.api.asgi.problems import InvalidField
from mansio.api.http.v1.operation import Body, Call, Operation, Result, check_topic_name
from mansio.api.http.v1.topics import CURSOR_HELP, Cursor, Limit, decode_cursor, encode_cursor
from mansio.client.admin.transactions import HANGING_OPEN_MS_MIN
from mansio.wire.topic_partition import TopicPartition

if TYPE_CHECKING:
    from collections.abc import Sequence

Milliseconds = Annotated[int, Field(ge=0, lt=1 << 53)]
NodeId = Annotated[int, Field(ge=0, lt=1 << 31)]
Offset = Annotated[int, Field(ge=0, lt=1 << 63)]


class TransactionParameters(Body):
    limit: Limit = 100
    cursor: Cursor | None = Field(None, description=CURSOR_HELP)
    state: Annotated[str, Field(min_length=1, max_length=50)] | None = Field(
        None, description="Kafka's name of a state, such as Ongoing."
    )
    producer_id: Annotated[int, Field(ge=0, lt=1 << 63)] | None = None
    open_ms_min: Milliseconds | None = Field(None, description="Only transactions that are open for longer.")
    pattern: Annotated[str, Field(min_length=1, max_length=1_000)] | None = Field(
        None, description="Regular expression (RE2) of whole ids."
    )


class TransactionSummary(Result):
    transactional_id: str
    producer_id: int
    state: str
    coordinator_id: int


class TransactionPage(Result):
    """`is_complete`: whether all coordinators of the cluster answered."""

    transactions: list[TransactionSummary]
    is_complete: bool
    next_cursor: str | None


class TransactionPartition(Result):
    topic: str
    partition: int


class TransactionState(Result):
    """`started_ms`: time since the Unix epoch, null without a transaction."""

    transactional_id: str
    coordinator_id: int
    state: str
    producer_id: int
    producer_epoch: int
    timeout_ms: int
    started_ms: int | None
    partitions: list[TransactionPartition]


class Producer(Result):
    """`transaction_start_offset`: the first offset of its open transaction, null without one."""

    producer_id: int
    producer_epoch: int
    last_sequence: int | None
    last_timestamp_ms: int
    coordinator_epoch: int | None
    transaction_start_offset: int | None


class Producers(Result):
    producers: list[Producer]


class HangingParameters(Body):
    topic: Annotated[str, Field(min_length=1, max_length=249)] | None = None
    partition: Annotated[int, Field(ge=0, lt=1 << 31)] | None = None
    broker_id: NodeId | None = Field(None, description="Only partitions that this broker leads.")
    open_ms_min: Milliseconds = Field(
        HANGING_OPEN_MS_MIN, description="Only producers without a batch for longer."
    )


class Hanging(Result):
    """A transaction that is open in a partition and not known to its coordinator."""

    topic: str
    partition: int
    producer_id: int
    producer_epoch: int
    coordinator_epoch: int | None
    start_offset: int
    last_timestamp_ms: int
    open_ms: int
    transactional_id: str | None


class HangingTransactions(Result):
    transactions: list[Hanging]


class Abort(Body):
    """`start_offset`: where the transaction begins. `force`: also if its coordinator knows it."""

    start_offset: Offset
    force: bool = False


async def list_transactions(call: Call) -> TransactionPage:
    query: TransactionParameters = call.query
    after = decode_cursor(query.cursor)
    listed = await call.client.admin.transactions.list(
        states=[] if query.state is None else [query.state],
        producer_ids=[] if query.producer_id is None else [query.producer_id],
        open_ms_min=query.open_ms_min,
        pattern=query.pattern,
    )
    found = [each for each in listed if each.transactional_id > after]
    page = found[: query.limit]
    return TransactionPage.model_validate(
        {
            "transactions": page,
            "is_complete": listed.is_complete,
            "next_cursor": encode_cursor(page[-1].transactional_id) if len(found) > len(page) else None,
        }
    )


async def describe(call: Call) -> TransactionState:
    found = await call.client.admin.transactions.describe(call.path("transactional_id"))
    return TransactionState.model_validate(found)


async def terminate(call: Call) -> None:
    await call.client.admin.transactions.terminate(call.path("transactional_id"))


async def describe_producers(call: Call) -> Producers:
    partition = call.partition
    check_topic_name(partition.topic)
    found = await call.client.admin.transactions.describe_producers([partition])
    return Producers.model_validate({"producers": found[partition]})


async def find_hanging(call: Call) -> HangingTransactions:
    query: HangingParameters = call.query
    if query.topic is None and query.partition is not None:
        raise InvalidField("partition", "a partition needs a topic")
    chosen: Sequence[TopicPartition | str] | None = None
    if query.topic is not None:
        chosen = [query.topic if query.partition is None else TopicPartition(query.topic, query.partition)]
    found = await call.client.admin.transactions.find_hanging(
        chosen, node_id=query.broker_id, open_ms_min=query.open_ms_min
    )
    return HangingTransactions.model_validate({"transactions": found})


async def abort(call: Call) -> Producer:
    body: Abort = call.body
    partition = call.partition
    check_topic_name(partition.topic)
    found = await call.client.admin.transactions.abort(partition, body.start_offset, force=body.force)
    return Producer.model_validate(found)


OPERATIONS: Final = (
    Operation(
        "GET",
        "/transactions",
        "List transactional ids",
        list_transactions,
        query=TransactionParameters,
        result=TransactionPage,
        tag="transactions",
    ),
    Operation(
        "GET",
        "/transactions/{transactional_id}",
        "Describe a transactional id",
        describe,
        result=TransactionState,
        tag="transactions",
    ),
    Operation(
        "POST",
        "/transactions/{transactional_id}/terminate",
        "Abort the open transaction of a transactional id, and fence its producer",
        terminate,
        status=204,
        tag="transactions",
    ),
    Operation(
        "GET",
        "/hanging-transactions",
        "Transactions that are open in a partition and not known to their coordinator",
        find_hanging,
        query=HangingParameters,
        result=HangingTransactions,
        tag="transactions",
    ),
    Operation(
        "GET",
        "/topics/{topic}/partitions/{partition}/producers",
        "Producers of a partition, with their open transactions",
        describe_producers,
        result=Producers,
        tag="transactions",
    ),
    Operation(
        "POST",
        "/topics/{topic}/partitions/{partition}/transactions/abort",
        "Abort a hanging transaction in a partition",
        abort,
        body=Abort,
        result=Producer,
        tag="transactions",
    ),
)
