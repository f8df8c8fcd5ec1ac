"""The public Python API, read from the modules: names, signatures, members and docstrings.

`api_reference` writes docs/reference/api from it, `blocking_stub` the types of `mansio.blocking`. A test compares it
with tests/golden/public_api.txt, which is written by `python -m tools.public_api > tests/golden/public_api.txt`.
"""

from __future__ import annotations

import ast
import dataclasses
import enum
import functools
import importlib
import inspect
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ForwardRef

if TYPE_CHECKING:
    from collections.abc import Iterator

MODULES = (
    "mansio",
    "mansio.blocking",
    "mansio.errors",
    "mansio.serde",
    "mansio.spark",
    "mansio.spark.functions",
    "mansio.spark.work",
    "mansio.testing",
)

PUBLIC_MEMBERS = {
    "ArchiveTable": {"iceberg", "name", "topic", "topic_id"},
    "BackfilledRange": {"pipeline", "times", "topics"},
    "ResultTable": {"iceberg", "name"},
    "RewriteReport": {
        "bytes_after",
        "bytes_before",
        "files_conflicting",
        "files_replaced",
        "files_written",
        "manifests_after",
        "manifests_before",
        "rows",
    },
    "Selection": {"partitions", "starts", "ends", "from_us", "to_us"},
    "TimeRange": {"from_ms", "to_ms"},
    "TableVersion": {"at_ms", "snapshot_id", "ends", "is_latest"},
}
"""Classes that users mostly pass on; their other members serve the Spark jobs and are private."""

CONSTRUCTED = {"BlockingSerde", "DeadLetterAnalysis", "EmbeddedBroker", "Serde", "TestBroker"}
"""Classes with an `__init__` of their own that users call; objects of the others come from methods."""

SYNTAX = {
    "__aenter__": "`async with`",
    "__enter__": "`with`",
    "__aiter__": "`async for`",
    "__iter__": "`for`",
    "__await__": "`await`",
}
BUILT_IN = (object, tuple, list, Exception, BaseException, enum.Enum)


@dataclass(frozen=True, slots=True)
class Member:
    """A public member of a class. `kind`: "method", "property", "field" or "attribute"; `declaration`: its source."""

    name: str
    kind: str
    declaration: str
    docstring: str


def public_names(module_name: str) -> list[str]:
    """Names that a public module exports: `__all__`, or what it defines without an underscore."""
    module = importlib.import_module(module_name)
    names = getattr(module, "__all__", None)
    if names is None:
        names = [
            name
            for name, value in vars(module).items()
            if not name.startswith("_") and getattr(value, "__module__", module_name) == module_name
        ]
        names = [name for name in names if not inspect.ismodule(getattr(module, name))]
    return sorted(name for name in names if not name.startswith("__"))


def public_objects(module_name: str) -> dict[str, Any]:
    """The exported names of a module and their objects, without submodules."""
    module = importlib.import_module(module_name)
    found = {name: getattr(module, name) for name in public_names(module_name)}
    return {name: value for name, value in found.items() if not inspect.ismodule(value)}


def is_error(value: object) -> bool:
    """Whether it is an exception class."""
    return inspect.isclass(value) and issubclass(value, BaseException)


def members(kind: type) -> list[Member]:
    """The public members of a class, in the order of the source; those of bases follow."""
    found: dict[str, Member] = {}
    for owner in kind.__mro__:
        if owner in BUILT_IN or owner.__module__ == "typing" or not owner.__module__.startswith("mansio"):
            continue
        for member in (*_fields(owner), *_methods(owner)):
            is_public = member.name in PUBLIC_MEMBERS.get(kind.__name__, {member.name})
            if is_public and not member.name.startswith("_"):
                found.setdefault(member.name, member)
    return list(found.values())


def syntax(kind: type) -> list[str]:
    """The statements that objects of a class support, such as `async with`."""
    own = {
        name
        for owner in kind.__mro__
        if owner not in BUILT_IN and owner.__module__.startswith("mansio")
        for name in vars(owner)
    }
    return [text for name, text in SYNTAX.items() if name in own]


def signature(function: Any, *, is_method: bool = False) -> str:
    """Parameters and result of a function as source text."""
    found = inspect.signature(function)
    parameters = list(found.parameters.values())[1 if is_method else 0 :]
    texts, previous = [], None
    for parameter in parameters:
        if parameter.kind is parameter.KEYWORD_ONLY and previous not in (
            parameter.KEYWORD_ONLY,
            parameter.VAR_POSITIONAL,
        ):
            texts.append("*")
        texts.append(_parameter(parameter))
        previous = parameter.kind
    result = annotation(found.return_annotation)
    return f"({', '.join(texts)})" + (f" -> {result}" if result else "")


def annotation(value: Any) -> str:
    """An annotation as source text; "" if there is none."""
    if value is inspect.Signature.empty:
        return ""
    if isinstance(value, ForwardRef):
        return value.__forward_arg__
    if isinstance(value, str):
        return value.replace("'", '"')
    return value.__name__ if inspect.isclass(value) else repr(value).replace("typing.", "")


def is_coroutine(function: Any) -> bool:
    """Whether a function is declared with `async`."""
    return inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function)


def constant_docstring(module_name: str, name: str) -> str:
    """The string below the assignment of a module's constant or type alias."""
    return _string(_assignment(module_name, name)[1])


def constant_declaration(module_name: str, name: str) -> str:
    """That assignment; the type instead of the value where it is annotated."""
    statement = _assignment(module_name, name)[0]
    if isinstance(statement, ast.AnnAssign) and source(statement.annotation) != "Final":
        return f"{name}: {source(statement.annotation)}"
    assert statement.value is not None
    return f"{name} = {source(statement.value)}"


def _assignment(module_name: str, name: str) -> tuple[ast.Assign | ast.AnnAssign, ast.stmt | None]:
    for statement, following in _statements(importlib.import_module(module_name)):
        if isinstance(statement, ast.Assign | ast.AnnAssign):
            target = statement.targets[0] if isinstance(statement, ast.Assign) else statement.target
            if isinstance(target, ast.Name) and target.id == name:
                return statement, following
    raise LookupError(f"{module_name} assigns nothing to {name}")


def defining_module(module_name: str, name: str) -> tuple[str, str]:
    """The module that defines an exported name, and its name there."""
    module = importlib.import_module(module_name)
    value = getattr(module, name)
    if inspect.isclass(value) or inspect.isfunction(value):
        return value.__module__, value.__name__
    lazy = getattr(module, "_LAZY", {})
    if isinstance(lazy.get(name), str):
        return lazy[name].partition(":")[0], name
    for statement, _ in _statements(module):
        if isinstance(statement, ast.ImportFrom) and any(alias.name == name for alias in statement.names):
            return str(statement.module), name
    return module_name, name


def _statements(source: Any) -> Iterator[tuple[ast.stmt, ast.stmt | None]]:
    """The statements of a module or class, each with the following one."""
    body = _tree(source.__module__ if inspect.isclass(source) else source.__name__).body
    if inspect.isclass(source):
        (node,) = (one for one in body if isinstance(one, ast.ClassDef) and one.name == source.__name__)
        body = node.body
    yield from zip(body, [*body[1:], None], strict=True)


@functools.cache
def _tree(module_name: str) -> ast.Module:
    return ast.parse(inspect.getsource(importlib.import_module(module_name)))


def _string(statement: ast.stmt | None) -> str:
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
        return inspect.cleandoc(str(statement.value.value))
    return ""


def _fields(owner: type) -> Iterator[Member]:
    """Annotated fields, class attributes, and attributes that `__init__` sets."""
    is_record = dataclasses.is_dataclass(owner) or hasattr(owner, "_fields")
    for statement, following in _statements(owner):
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            name = statement.target.id
            text = f"{name}: {source(statement.annotation)}{_field_default(owner, statement)}"
            yield Member(name, "field" if is_record else "attribute", text, _string(following))
        elif isinstance(statement, ast.Assign) and issubclass(owner, enum.Enum):
            assert isinstance(statement.targets[0], ast.Name)
            yield Member(statement.targets[0].id, "attribute", ast.unparse(statement), _string(following))
        elif isinstance(statement, ast.FunctionDef) and statement.name == "__init__":
            body = statement.body
            for inner, after in zip(body, [*body[1:], None], strict=True):
                target = inner.targets[0] if isinstance(inner, ast.Assign) else getattr(inner, "target", None)
                if isinstance(target, ast.Attribute) and getattr(target.value, "id", "") == "self":
                    note = getattr(inner, "annotation", None)
                    text = f"{target.attr}: {source(note)}" if note is not None else target.attr
                    yield Member(target.attr, "attribute", text, _string(after))


def source(expression: ast.expr) -> str:
    """An expression as text, with double quotes."""
    return ast.unparse(expression).replace("'", '"')


def _field_default(owner: type, statement: ast.AnnAssign) -> str:
    if statement.value is None:
        return ""
    if isinstance(statement.value, ast.Constant | ast.BinOp):
        return f" = {source(statement.value)}"
    name = statement.target.id if isinstance(statement.target, ast.Name) else ""
    if dataclasses.is_dataclass(owner):
        value = next(field.default for field in dataclasses.fields(owner) if field.name == name)
    else:
        value = getattr(owner, "_field_defaults", {}).get(name, ...)
    return f" = {default(value)}"


def _methods(owner: type) -> Iterator[Member]:
    for name, value in vars(owner).items():
        if isinstance(value, property):
            assert value.fget is not None
            result = annotation(inspect.signature(value.fget).return_annotation)
            yield Member(name, "property", f"{name}: {result}", inspect.getdoc(value) or "")
        elif inspect.isfunction(value):
            # Methods of `mansio.blocking` are made from the coroutines of the asyncio classes, but do not wait.
            prefix = "async def" if is_coroutine(value) else "def"
            text = f"{prefix} {name}{signature(value, is_method=True)}"
            yield Member(name, "method", text, inspect.getdoc(value) or "")


def _parameter(parameter: inspect.Parameter) -> str:
    prefixes: dict[Any, str] = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}
    stars = prefixes.get(parameter.kind, "")
    text = f"{stars}{parameter.name}"
    kind = annotation(parameter.annotation)
    if kind:
        text += f": {kind}"
    if parameter.default is not parameter.empty:
        equals = " = " if kind else "="
        text += f"{equals}{default(parameter.default)}"
    return text


def default(value: Any) -> str:
    """A default value as source text, without addresses of objects."""
    if isinstance(value, str):
        return f'"{value}"'
    if value is None or isinstance(value, bool | int | float | bytes | tuple):
        return repr(value)
    return "..."


def listing() -> str:
    """Every public name with its signature, a line each: what a release promises to keep."""
    lines = []
    for module_name in MODULES:
        for name, value in public_objects(module_name).items():
            path = f"{module_name}.{name}"
            if is_error(value):
                codes = f"{value.kafka_code}, {value.http_status}" if hasattr(value, "kafka_code") else ""
                lines.append(f"{path}({value.__bases__[0].__name__}): {codes}")
            elif inspect.isclass(value):
                lines.append(" ".join([path, *syntax(value)]))
                lines += [f"{path}: {member.declaration}" for member in members(value)]
            elif inspect.isfunction(value):
                lines.append(f"{path}{signature(value)}")
            else:
                lines.append(f"{module_name}.{constant_declaration(*defining_module(module_name, name))}")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(listing())
