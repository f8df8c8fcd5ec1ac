"""Rules for exceptions as values (`mansio.tracebacks`), as findings of `tools.structure`.

* "stored exception": an exception that an `except` clause caught, or that a parameter is annotated as, is assigned to
  something that outlives the function, returned, put into a container, result or promise, or scheduled, without
  `without_traceback` or `copied`.
* "raised value": `raise name`, `raise object.attribute` or `raise items[0]` raises an object that a local or a stored
  value refers to, without `copied`. The name of the `except` clause itself is exempt: Python deletes it.

A function that deletes the name in a `finally` clause may do both.
"""

from __future__ import annotations

import ast
import builtins
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

KEPT = {
    "mansio/client/tasks.py": "the end of a client is logged with its traceback, and its calls raise it as their cause",
    "mansio/client/transactions/processor.py": "the error of the caller's handler is raised with its own traceback",
    "mansio/pipelines/cluster_check.py": "of one command, which ends",
    "mansio/testing/": "a defect in a test is raised with its traceback",
    "mansio/ports.py": "the helper that completes a promise; the rule is checked where it is called",
    "mansio/tracebacks.py": "the helpers",
    "mansio_demo/": "it ends with the error",
}
"""Modules, or folders, that keep tracebacks, and why."""

STRIPPED = frozenset({"without_traceback", "copied"})
STORING = frozenset(
    {
        *("add", "append", "appendleft", "insert", "put", "put_nowait", "setdefault", "fromkeys"),
        *(
            "call_at",
            "call_later",
            "call_soon",
            "call_soon_threadsafe",
            "complete",
            "complete_with_error",
            "partial",
            "set_exception",
            "set_result",
        ),
    }
)
"""Functions that keep their arguments."""
_TRANSPARENT = (
    ast.BinOp,
    ast.BoolOp,
    ast.Dict,
    ast.DictComp,
    ast.GeneratorExp,
    ast.List,
    ast.ListComp,
    ast.NamedExpr,
    ast.Set,
    ast.Starred,
    ast.Tuple,
    ast.keyword,
)
_Function = ast.FunctionDef | ast.AsyncFunctionDef


def exception_names(trees: Iterable[ast.Module]) -> frozenset[str]:
    """Names of all exception classes: Python's, and those that the trees define."""
    known = {
        name
        for name, value in vars(builtins).items()
        if isinstance(value, type) and issubclass(value, BaseException)
    }
    classes = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    size = 0
    while size != len(known):
        size = len(known)
        known |= {each.name for each in classes if any(_last_name(base) in known for base in each.bases)}
    return frozenset(known)


def stored_exceptions(tree: ast.Module, exceptions: frozenset[str]) -> Iterator[tuple[int, str]]:
    """(line, source) of each exception that is stored with its traceback."""
    parents = _parents(tree)
    for scope in _scopes(tree, exceptions):
        if scope.name in scope.deleted:
            continue
        for node in (one for statement in scope.body for one in ast.walk(statement)):
            if isinstance(node, ast.Name) and node.id == scope.name and isinstance(node.ctx, ast.Load):
                holder = _holder(node, parents, scope)
                if holder is not None:
                    yield node.lineno, ast.unparse(holder)


def raised_values(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, source) of each `raise` of an object that something refers to."""
    yield from _raised_values(tree, frozenset())


def _raised_values(node: ast.AST, exempt: frozenset[str]) -> Iterator[tuple[int, str]]:
    if isinstance(node, _Function):
        exempt = frozenset(_deleted(node))
    elif isinstance(node, ast.ExceptHandler) and node.name:
        exempt |= {node.name}
    elif isinstance(node, ast.Raise) and node.exc is not None:
        options = node.exc.values if isinstance(node.exc, ast.BoolOp) else [node.exc]
        for each in options:
            name = _last_name(each).lstrip("_")
            is_class = name[:1].isupper() and not isinstance(each, ast.Subscript)
            if (
                isinstance(each, ast.Name | ast.Attribute | ast.Subscript)
                and not is_class
                and name not in exempt
            ):
                yield node.lineno, ast.unparse(node)
    for child in ast.iter_child_nodes(node):
        yield from _raised_values(child, exempt)


class _Scope(NamedTuple):
    """Name of an exception, the statements in which it is known, and the names that the function deletes at its end."""

    name: str
    body: list[ast.stmt]
    deleted: frozenset[str]
    is_argument: bool


def _scopes(tree: ast.Module, exceptions: frozenset[str]) -> Iterator[_Scope]:
    for function in [tree, *(node for node in ast.walk(tree) if isinstance(node, _Function))]:
        deleted = frozenset(_deleted(function))
        if isinstance(function, _Function):
            arguments = function.args
            for each in [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]:
                options = _options(each.annotation)
                if options and options <= exceptions:
                    yield _Scope(each.arg, function.body, deleted, is_argument=True)
        for node in _own_nodes(function):
            if isinstance(node, ast.ExceptHandler) and node.name:
                yield _Scope(node.name, node.body, deleted, is_argument=False)


def _own_nodes(function: ast.AST) -> Iterator[ast.AST]:
    """All nodes of a function without those of the functions inside it."""
    for child in ast.iter_child_nodes(function):
        yield child
        if not isinstance(child, _Function):
            yield from _own_nodes(child)


def _deleted(function: ast.AST) -> Iterator[str]:
    for node in _own_nodes(function):
        for statement in node.finalbody if isinstance(node, ast.Try) else [node]:
            if isinstance(statement, ast.Delete):
                yield from (each.id for each in statement.targets if isinstance(each, ast.Name))


def _options(annotation: ast.expr | None) -> set[str]:
    """Names of the classes in `A | B | None`."""
    if isinstance(annotation, ast.BinOp):
        return _options(annotation.left) | _options(annotation.right)
    return {_last_name(annotation)} if isinstance(annotation, ast.Name | ast.Attribute) else set()


def _holder(name: ast.AST, parents: dict[ast.AST, ast.AST], scope: _Scope) -> ast.AST | None:
    """The statement or call that keeps an exception; None if nothing does."""
    node, parent = name, parents[name]
    while isinstance(parent, _TRANSPARENT) or (isinstance(parent, ast.IfExp) and node is not parent.test):
        node, parent = parent, parents[parent]
    if isinstance(parent, ast.Assign | ast.AnnAssign):
        targets = parent.targets if isinstance(parent, ast.Assign) else [parent.target]
        names = [each.id if isinstance(each, ast.Name) else None for each in targets]
        return (
            None if all(each and (scope.is_argument or each in scope.deleted) for each in names) else parent
        )
    if isinstance(parent, ast.Return | ast.Yield):
        return parent
    if (
        isinstance(parent, ast.Call)
        and node is not parent.func
        and not isinstance(parents[parent], ast.Raise)
    ):
        function = parent.func
        makes = _last_name(function).lstrip("_")[:1].isupper() or (
            isinstance(function, ast.Attribute) and _last_name(function.value)[:1].isupper()
        )
        return parent if makes or _last_name(function) in STORING else None
    return None


def _parents(tree: ast.AST) -> dict[ast.AST, ast.AST]:
    return {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}


def _last_name(node: ast.AST | None) -> str:
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""
