"""Callbacks and parts of an object that another module sets after its construction.

An object that is complete after its constructor can be read alone: what it calls is among its parameters. Therefore a
module may not assign to an attribute of an object of another module's class, if the class declares it

* as a callback: its annotation names `Callable`, or
* without a value: `self.topic: CoordinatorRuntime` in the constructor, to be set by others.

A class that accepts a callback later, for example for one request, has a method for it.

The class of an object is that of the annotation of a parameter, attribute or variable, or of the call that makes it.
Where the class of an object is not known, each class of the project that declares the attribute counts.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

CALLBACK, MISSING, VALUE = "callback", "part", "value"

_Function = ast.FunctionDef | ast.AsyncFunctionDef


class Declaration(NamedTuple):
    """An attribute as one class declares it: a callback, a part that is set later, or another value."""

    path: str
    owner: str
    kind: str


def declarations(trees: Mapping[str, ast.Module]) -> dict[str, list[Declaration]]:
    """Name of an attribute -> its declarations. `trees`: path of a module -> its syntax."""
    found: dict[str, list[Declaration]] = defaultdict(list)
    for path, tree in trees.items():
        for owner in ast.walk(tree):
            if isinstance(owner, ast.ClassDef):
                for name, kind in _declared(owner).items():
                    found[name].append(Declaration(path, owner.name, kind))
    return found


def _declared(owner: ast.ClassDef) -> dict[str, str]:
    """Name of each attribute of a class -> its kind. The first declaration that is no plain assignment counts."""
    found: dict[str, str] = {}
    for node in owner.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found[node.target.id] = CALLBACK if _is_callback(node.annotation) else VALUE
        elif isinstance(node, _Function):
            if node.decorator_list and node.name not in found:
                found[node.name] = VALUE  # a property
            for name, kind in _assigned(node):
                if found.get(name, VALUE) == VALUE:
                    found[name] = kind
    return found


def _assigned(function: _Function) -> Iterator[tuple[str, str]]:
    """Yield the attributes of `self` to which a method assigns, and their kinds."""
    for node in ast.walk(function):
        if isinstance(node, ast.AnnAssign) and _is_own(node.target):
            assert isinstance(node.target, ast.Attribute)
            is_callback = _is_callback(node.annotation)
            yield node.target.attr, CALLBACK if is_callback else MISSING if node.value is None else VALUE
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _is_own(node):
            yield node.attr, VALUE


def _is_callback(annotation: ast.expr) -> bool:
    """Whether a value with this annotation is a function, or None."""
    if isinstance(annotation, ast.BinOp):
        return _is_callback(annotation.left) or _is_callback(annotation.right)
    return _name(annotation.value if isinstance(annotation, ast.Subscript) else annotation) == "Callable"


def _name(node: ast.AST | None) -> str:
    """The last part of a dotted name, of `Name | None` the name; empty for anything else."""
    if isinstance(node, ast.BinOp):
        return _name(node.left)
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _is_own(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id in ("self", "cls")
    )


def late_slots(trees: Mapping[str, ast.Module]) -> list[str]:
    """Assignments to a callback or part of an object of another module's class."""
    declared = declarations(trees)
    late = {name for name, found in declared.items() if any(each.kind != VALUE for each in found)}
    found = []
    for path, tree in trees.items():
        if not any(node.attr in late for node in _stores(tree)):
            continue
        for owner, methods in _scopes(tree):
            stores = [(method, node) for method in methods for node in _stores(method) if node.attr in late]
            if not stores:
                continue
            shared = {} if owner is None else _attribute_types(methods)
            for method, node in stores:
                owner_name = _class_of(node.value, shared | _types(method))
                kind = _kind(declared[node.attr], owner_name, path)
                if kind != VALUE:
                    found.append(f"{path}:{node.lineno} sets the {kind} {ast.unparse(node)}")
    return sorted(set(found))


def _stores(tree: ast.AST) -> Iterator[ast.Attribute]:
    """Yield the attributes of other objects to which a module or function assigns."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and not _is_own(node):
            yield node


def _kind(declared: Iterable[Declaration], owner: str, path: str) -> str:
    """The kind of an attribute of an object, as far as the class `owner` is known, otherwise empty."""
    declared = [each for each in declared if not owner or each.owner == owner]
    if not declared or any(each.path == path or each.kind == VALUE for each in declared):
        return VALUE
    return declared[0].kind


def _scopes(tree: ast.Module) -> Iterator[tuple[ast.ClassDef | None, list[_Function]]]:
    """Yield the functions of a module, and each class with its methods."""
    yield None, [node for node in tree.body if isinstance(node, _Function)]
    for owner in ast.walk(tree):
        if isinstance(owner, ast.ClassDef):
            yield owner, [node for node in owner.body if isinstance(node, _Function)]


def _attribute_types(methods: Iterable[_Function]) -> dict[str, str]:
    """`self.NAME` -> name of its class, as far as a method of the class shows it."""
    found: dict[str, str] = {}
    for method in methods:
        found |= {name: kind for name, kind in _types(method).items() if name.startswith("self.")}
    return found


def _types(function: _Function) -> dict[str, str]:
    """Name of a parameter or variable, or `self.NAME` -> name of its class, as far as the function shows it."""
    found = {each.arg: _name(each.annotation) for each in (*function.args.args, *function.args.kwonlyargs)}
    for node in ast.walk(function):
        if isinstance(node, ast.AnnAssign):
            found[_key(node.target)] = _name(node.annotation)
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                if made := _class_of(node.value, found):
                    found[_key(target)] = made
    return {name: kind for name, kind in found.items() if name and kind}


def _key(node: ast.AST) -> str:
    if isinstance(node, ast.Attribute) and _is_own(node):
        return f"self.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def _class_of(node: ast.expr, types: Mapping[str, str]) -> str:
    """The name of the class of an expression, empty if it is not known."""
    if isinstance(node, ast.Call):
        name = _name(node.func)
        return name if name[:1].isupper() else ""
    return types.get(_key(node), "")
