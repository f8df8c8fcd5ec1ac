"""`mansio acl`: list, add, remove access control lists, and check what a user may do.

Invariants:
* Words are Kafka's: operations (`READ`), types of resources (`topic`), principals (`User:alice`). A name without a type
  is that of a user.
* The names of all resources in one command have the same kind of pattern: exact, or a prefix with `--prefix`.
"""

from __future__ import annotations

import sys
from ipaddress import ip_address
from typing import TYPE_CHECKING, Annotated, Any, Final, NamedTuple

import typer

from mansio.cli.support.common import (
    DEFAULT_BOOTSTRAP_SERVERS,
    BootstrapServersOption,
    YesOption,
    confirm,
    connect,
    run,
    usage_error,
)
from mansio.cli.support.formatting import Output, OutputOption, count_text, show_rows

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from mansio.client.admin.acls import AclDecision
    from mansio.state.authorization.acls import Acl, AclFilter, Operation, PatternType, ResourceType

app = typer.Typer(no_args_is_help=True, help="Access control lists: what users may do.")

COLUMNS: Final = ("permission", "principal", "operation", "resource", "name", "pattern", "host")
ALL_HOSTS: Final = "*"
SHOWN_MAX: Final = 1_000
"""Number of ACLs that `list` shows unless `--limit` is given; a cluster may have 20,000."""
REFUSED_EXIT_CODE: Final = 1

PrincipalArgument = Annotated[
    str,
    typer.Argument(metavar="USER", help="Name of a user, or a principal, such as Group:payments or User:*."),
]
RoleOption = Annotated[
    str | None,
    typer.Option(
        "--role", metavar="ROLE", help="reader, writer, worker or operator: adds the ACLs that it needs."
    ),
]
OperationsOption = Annotated[
    list[str] | None,
    typer.Option("--operation", metavar="OPERATION", help="READ, WRITE, DESCRIBE, ... or ALL; repeatable."),
]
TopicsOption = Annotated[
    list[str] | None, typer.Option("--topic", metavar="NAME", help="A topic, * for all; repeatable.")
]
GroupsOption = Annotated[
    list[str] | None,
    typer.Option("--group", metavar="NAME", help="A group or share group, * for all; repeatable."),
]
TransactionalIdsOption = Annotated[
    list[str] | None, typer.Option("--transactional-id", metavar="ID", help="A transactional id; repeatable.")
]
SubjectsOption = Annotated[
    list[str] | None,
    typer.Option("--subject", metavar="NAME", help="A subject of the schema registry; repeatable."),
]
UsersOption = Annotated[
    list[str] | None,
    typer.Option("--user", metavar="NAME", help="A user, as the owner of delegation tokens; repeatable."),
]
TokensOption = Annotated[
    list[str] | None, typer.Option("--delegation-token", metavar="ID", help="A delegation token; repeatable.")
]
ClusterOption = Annotated[bool, typer.Option("--cluster", help="The cluster.")]
PrefixOption = Annotated[
    bool, typer.Option("--prefix", help="The names are prefixes: all resources whose names begin with them.")
]
HostOption = Annotated[
    str | None, typer.Option("--host", metavar="ADDRESS", help="Only from this address. Default: from all.")
]
DenyOption = Annotated[bool, typer.Option("--deny", help="Deny; a denial prevails over what is allowed.")]


@app.callback()
def command_group() -> None:
    """Access control lists: what users may do."""


@app.command()
def add(
    principal: PrincipalArgument,
    role: RoleOption = None,
    operations: OperationsOption = None,
    topics: TopicsOption = None,
    groups: GroupsOption = None,
    transactional_ids: TransactionalIdsOption = None,
    subjects: SubjectsOption = None,
    users: UsersOption = None,
    delegation_tokens: TokensOption = None,
    cluster: ClusterOption = False,
    prefix: PrefixOption = False,
    host: HostOption = None,
    deny: DenyOption = False,
    output: OutputOption = Output.TABLE,
    bootstrap_servers: BootstrapServersOption = DEFAULT_BOOTSTRAP_SERVERS,
) -> None:
    """Allow or deny a user operations on resources. Prints the ACLs.

    Give the operations with --operation, or a --role, which stands for all that it needs. Users and resources need not
    exist: `mansio acl check` tells what a user may do.

    reader: --topic, --group, --subject; writer: --topic, --transactional-id, --subject; worker of a share group:
    --topic, --group, --subject; operator: administers the cluster, its topics, groups and subjects, and reads no
    records but the audit.
    """
    selected = _names(topics, groups, transactional_ids, subjects, users, delegation_tokens, cluster=cluster)
    if (role is None) == (not operations):
        usage_error("give either --role or --operation", "--operation")
    _check_effect(topics or (), prefix=prefix, host=host)
    if role is not None:
        if deny:
            usage_error("a role allows", "--deny")
        acls = _acls_of_role(role, _principal(principal), selected, prefix=prefix, host=host)
    else:
        acls = _acls(_principal(principal), operations or (), selected, prefix=prefix, host=host, deny=deny)

    async def work() -> None:
        async with connect(bootstrap_servers) as client:
            await client.admin.acls.create(acls)

    run(work())
    _show(output, acls)


@app.command("list")
def list_acls(
    principal: Annotated[
        str | None, typer.Option("--principal", metavar="USER", help="Only of this user or principal.")
    ] = None,
    operations: OperationsOption = None,
    topics: TopicsOption = None,
    groups: GroupsOption = None,
    transactional_ids: TransactionalIdsOption = None,
    subjects: SubjectsOption = None,
    users: UsersOption = None,
    delegation_tokens: TokensOption = None,
    cluster: ClusterOption = False,
    exact: Annotated[
        bool,
        typer.Option(
            "--exact",
            help="Only ACLs with these names; otherwise all that apply to the resources, prefixes too.",
        ),
    ] = False,
    limit: Annotated[
        int, typer.Option("--limit", min=1, metavar="COUNT", help="Maximum number of ACLs in a table.")
    ] = SHOWN_MAX,
    output: OutputOption = Output.TABLE,
    bootstrap_servers: BootstrapServersOption = DEFAULT_BOOTSTRAP_SERVERS,
) -> None:
    """List the ACLs, or those of a user or for resources.

    The ACLs of a user are selected with --principal.
    """
    selected = _names(topics, groups, transactional_ids, subjects, users, delegation_tokens, cluster=cluster)
    filters = _filters(
        None if principal is None else _principal(principal), operations, selected, matches=not exact
    )

    async def work() -> list[Acl]:
        async with connect(bootstrap_servers) as client:
            found: dict[Acl, None] = {}
            for each in filters:
                found |= dict.fromkeys(await client.admin.acls.list(each))
            return [*found]

    acls = run(work())
    _show(output, acls if output is Output.JSON else acls[:limit])
    if output is Output.TABLE and len(acls) > limit:
        print(f"mansio: {limit} of {count_text(len(acls), 'ACL')}; see --limit", file=sys.stderr)


@app.command()
def remove(
    principal: PrincipalArgument,
    role: RoleOption = None,
    operations: OperationsOption = None,
    topics: TopicsOption = None,
    groups: GroupsOption = None,
    transactional_ids: TransactionalIdsOption = None,
    subjects: SubjectsOption = None,
    users: UsersOption = None,
    delegation_tokens: TokensOption = None,
    cluster: ClusterOption = False,
    prefix: PrefixOption = False,
    host: HostOption = None,
    deny: DenyOption = False,
    everything: Annotated[bool, typer.Option("--all", help="All ACLs of the user.")] = False,
    yes: YesOption = False,
    output: OutputOption = Output.TABLE,
    bootstrap_servers: BootstrapServersOption = DEFAULT_BOOTSTRAP_SERVERS,
) -> None:
    """Remove ACLs of a user. Prints them.

    They are exactly those that `add` with the same options adds, or --all. Others that allow the same, with prefixes
    for example, stay; `mansio acl check` tells.
    """
    from mansio.state.authorization.acls import AclFilter

    selected = _names(topics, groups, transactional_ids, subjects, users, delegation_tokens, cluster=cluster)
    if sum((role is not None, bool(operations), everything)) != 1:
        usage_error("give --role, --operation or --all", "--operation")
    if everything:
        if selected or deny or prefix or host:
            usage_error("it takes no other selection", "--all")
        filters = [AclFilter(principal=_principal(principal))]
    elif role is not None:
        filters = _exactly(_acls_of_role(role, _principal(principal), selected, prefix=prefix, host=host))
    else:
        filters = _exactly(
            _acls(_principal(principal), operations or (), selected, prefix=prefix, host=host, deny=deny)
        )

    async def work() -> Sequence[Acl]:
        async with connect(bootstrap_servers) as client:
            found = dict.fromkeys(
                acl
                for acl in await client.admin.acls.list(AclFilter(principal=_principal(principal)))
                if any(each.matches(acl) for each in filters)
            )
            if found and not yes:
                _show(output, [*found])
                confirm(f"{count_text(len(found), 'ACL')} will be removed", is_sure=False)
            return await client.admin.acls.delete(_exactly(found)) if found else ()

    _show(output, run(work()), empty="no such ACLs")


@app.command()
def check(
    user: Annotated[str, typer.Argument(metavar="USER", help="Name of a user; - for your own.")],
    operation: Annotated[str, typer.Argument(metavar="OPERATION", help="READ, WRITE, DESCRIBE, ...")],
    resource: Annotated[
        str,
        typer.Argument(metavar="RESOURCE", help="cluster, or type and name: topic:orders, group:billing."),
    ],
    host: Annotated[
        str,
        typer.Option(
            "--host",
            metavar="ADDRESS",
            help="Address of the user. Without it, ACLs for single addresses do not count.",
        ),
    ] = "",
    member_of: Annotated[
        list[str] | None,
        typer.Option(
            "--member-of",
            metavar="GROUP",
            help="A group of users to which it belongs, without Group:; repeatable.",
        ),
    ] = None,
    output: OutputOption = Output.TABLE,
    bootstrap_servers: BootstrapServersOption = DEFAULT_BOOTSTRAP_SERVERS,
) -> None:
    """Tell what decides whether a user may do something.

    Prints the ACL that decides, or without one the command that would allow the operation.

    Exit code 0: allowed; 1: refused, or the check failed.
    """
    from mansio.state.authorization.acl_words import adding_command
    from mansio.state.authorization.acls import Acl, PatternType, Permission

    wanted, named = _operation(operation), _resource(resource)
    name = user.removeprefix("User:")
    if name.startswith("Group:"):
        usage_error("it is the name of a user; give a group of it with --member-of", "USER")

    async def work() -> AclDecision:
        async with connect(bootstrap_servers) as client:
            (decision,) = await client.admin.acls.check(
                [(wanted, named.kind, named.name)],
                user=None if user == "-" else name,
                groups=member_of or (),
                host=host,
            )
            return decision

    decision = run(work())
    row = {
        "allowed": decision.is_allowed,
        "reason": decision.reason,
        "acl": None if decision.acl is None else _row(decision.acl),
    }
    show_rows(output, [row], ("allowed", "reason"), empty="")
    if not decision.is_allowed:
        if decision.acl is None and user != "-" and output is Output.TABLE:
            missing = Acl(
                named.kind,
                PatternType.LITERAL,
                named.name,
                f"User:{name}",
                ALL_HOSTS,
                wanted,
                Permission.ALLOW,
            )
            print(f"mansio: to allow it: {adding_command(missing)}", file=sys.stderr)
        raise typer.Exit(REFUSED_EXIT_CODE)


class _Resource(NamedTuple):
    kind: ResourceType
    name: str


def _names(
    topics: Sequence[str] | None,
    groups: Sequence[str] | None,
    transactional_ids: Sequence[str] | None,
    subjects: Sequence[str] | None,
    users: Sequence[str] | None,
    delegation_tokens: Sequence[str] | None,
    *,
    cluster: bool,
) -> dict[ResourceType, Sequence[str]]:
    """Return the names of the resources that the options select, by type."""
    from mansio.state.authorization.acls import CLUSTER_NAME, ResourceType

    given = {
        ResourceType.TOPIC: topics,
        ResourceType.GROUP: groups,
        ResourceType.CLUSTER: (CLUSTER_NAME,) if cluster else None,
        ResourceType.TRANSACTIONAL_ID: transactional_ids,
        ResourceType.SUBJECT: subjects,
        ResourceType.DELEGATION_TOKEN: delegation_tokens,
        ResourceType.USER: [name if ":" in name else f"User:{name}" for name in users or ()],
    }
    return {kind: names for kind, names in given.items() if names}


def _check_effect(topics: Sequence[str], *, prefix: bool, host: str | None) -> None:
    """Refuse what no topic and no address can match."""
    for name in topics:
        if "*" in name and (prefix or name != "*"):
            usage_error(
                f"{name!r}: * stands for all names only alone; for a beginning write --topic BEGINNING --prefix",
                "--topic",
            )
    if host is not None and host != ALL_HOSTS:
        try:
            ip_address(host)
        except ValueError:
            usage_error(f"{host!r} is no IP address; names and networks match nothing", "--host")


def _principal(text: str) -> str:
    kind, colon, _ = text.partition(":")
    if colon and kind not in ("User", "Group") and kind.lower() in ("user", "group"):
        usage_error(f"{text!r}: write {kind.capitalize()}:NAME", "PRINCIPAL")
    return text if text.partition(":")[0] in ("User", "Group") and ":" in text else f"User:{text}"


def _operation(text: str) -> Operation:
    from mansio.state.authorization.acls import Operation

    try:
        return Operation[text.upper().replace("-", "_")]
    except KeyError:
        usage_error(
            f"{text!r} is not an operation; there are {', '.join(Operation.__members__)}", "OPERATION"
        )


def _resource(text: str) -> _Resource:
    from mansio.state.authorization.acl_words import word_of
    from mansio.state.authorization.acls import CLUSTER_NAME, ResourceType

    if text == word_of(ResourceType.CLUSTER):
        return _Resource(ResourceType.CLUSTER, CLUSTER_NAME)
    word, _, name = text.partition(":")
    kinds = {word_of(kind): kind for kind in ResourceType if kind is not ResourceType.CLUSTER}
    if word not in kinds or not name:
        usage_error(f"{text!r} is not a resource; write cluster, or {':NAME, '.join(kinds)}:NAME", "RESOURCE")
    return _Resource(kinds[word], name)


def _acls_of_role(
    text: str,
    principal: str,
    names: dict[ResourceType, Sequence[str]],
    *,
    prefix: bool,
    host: str | None,
) -> list[Acl]:
    from mansio.errors import InvalidRequest
    from mansio.state.authorization.roles import Role, acls_of_role

    try:
        role = Role(text)
    except ValueError:
        usage_error(f"{text!r} is not a role; there are {', '.join(Role)}", "--role")
    try:
        return acls_of_role(
            role, principal, names, pattern_type=_pattern_type(prefix=prefix), host=host or ALL_HOSTS
        )
    except InvalidRequest as error:
        usage_error(error.message, "--role")


def _acls(
    principal: str,
    operations: Sequence[str],
    names: dict[ResourceType, Sequence[str]],
    *,
    prefix: bool,
    host: str | None,
    deny: bool,
) -> list[Acl]:
    from mansio.errors import InvalidRequest
    from mansio.state.authorization.acl_words import word_of
    from mansio.state.authorization.acls import (
        OPERATIONS,
        Operation,
        Permission,
        ResourceType,
        checked_acl,
    )

    if not names:
        usage_error("give a resource, for example --topic orders", "--topic")
    acls = []
    for kind, of_kind in names.items():
        pattern = _pattern_type(prefix=prefix and kind is not ResourceType.CLUSTER)
        for operation in map(_operation, operations):
            if operation is not Operation.ALL and operation not in OPERATIONS[kind]:
                known = ", ".join(each.name for each in OPERATIONS[kind])
                usage_error(f"a {word_of(kind)} has no operation {operation.name}: {known}", "--operation")
            for name in of_kind:
                try:
                    acls.append(
                        checked_acl(
                            resource_type=kind,
                            pattern_type=pattern,
                            name=name,
                            principal=principal,
                            host=host or ALL_HOSTS,
                            operation=operation,
                            permission=Permission.DENY if deny else Permission.ALLOW,
                        )
                    )
                except InvalidRequest as error:
                    usage_error(error.message, "USER or resource")
    return acls


def _pattern_type(*, prefix: bool) -> PatternType:
    from mansio.state.authorization.acls import PatternType

    return PatternType.PREFIXED if prefix else PatternType.LITERAL


def _filters(
    principal: str | None,
    operations: Sequence[str] | None,
    names: dict[ResourceType, Sequence[str]],
    *,
    matches: bool,
) -> list[AclFilter]:
    """Return the filters that together select what the options of `list` do."""
    from mansio.state.authorization.acls import ANY, MATCH, AclFilter

    patterns = [
        AclFilter(kind, MATCH if matches else ANY, name)
        for kind, of_kind in names.items()
        for name in of_kind
    ] or [AclFilter()]
    wanted = [int(_operation(each)) for each in operations or ()] or [ANY]
    return [
        pattern._replace(principal=principal, operation=operation)
        for pattern in patterns
        for operation in wanted
    ]


def _exactly(acls: Iterable[Acl]) -> list[AclFilter]:
    from mansio.state.authorization.acls import AclFilter

    return [AclFilter(*acl) for acl in acls]


def _show(output: Output, acls: Iterable[Acl], *, empty: str = "no ACLs") -> None:
    show_rows(output, [_row(acl) for acl in acls], COLUMNS, empty=empty)


def _row(acl: Acl) -> dict[str, Any]:
    from mansio.state.authorization.acl_words import word_of

    return {
        "permission": acl.permission.name,
        "principal": acl.principal,
        "operation": acl.operation.name,
        "resource": word_of(acl.resource_type),
        "name": acl.name,
        "pattern": acl.pattern_type.name,
        "host": acl.host,
    }
