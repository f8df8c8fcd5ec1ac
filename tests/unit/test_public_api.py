"""The public Python API: what a release promises to keep, documented and typed."""

from __future__ import annotations

import difflib
import enum
import inspect
from typing import TYPE_CHECKING, Any

import pytest
from tools import public_api

from support.paths import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterator

GOLDEN = ROOT / "tests/golden/public_api.txt"


def public_objects() -> Iterator[tuple[str, str, Any]]:
    for module_name in public_api.MODULES:
        for name, value in public_api.public_objects(module_name).items():
            yield module_name, name, value


def functions(value: Any) -> Iterator[tuple[str, Any]]:
    if inspect.isfunction(value):
        yield value.__name__, value
    elif inspect.isclass(value) and not public_api.is_error(value):
        names = {member.name for member in public_api.members(value)}
        for name in sorted(names):
            member = inspect.getattr_static(value, name, None)
            function = member.fget if isinstance(member, property) else member
            if inspect.isfunction(function):
                yield f"{value.__name__}.{name}", function


def test_no_public_name_or_parameter_is_removed_or_added_unnoticed() -> None:
    found, expected = public_api.listing(), GOLDEN.read_text()
    differences = "\n".join(difflib.unified_diff(expected.splitlines(), found.splitlines(), lineterm="", n=0))
    assert found == expected, (
        f"{differences}\nif this is intended, and in the change log:"
        " python -m tools.public_api > tests/golden/public_api.txt"
    )


@pytest.mark.parametrize("module_name", public_api.MODULES)
def test_every_public_name_and_member_has_a_docstring(module_name: str) -> None:
    missing = []
    for name, value in public_api.public_objects(module_name).items():
        if inspect.isclass(value) or inspect.isfunction(value):
            docstring = vars(value).get("__doc__") if inspect.isclass(value) else inspect.getdoc(value)
        else:
            docstring = public_api.constant_docstring(*public_api.defining_module(module_name, name))
        # A dataclass or named tuple without a docstring has one that repeats its fields.
        if not docstring or docstring.startswith(f"{name}("):
            missing.append(name)
        if inspect.isclass(value) and not public_api.is_error(value):
            members = public_api.members(value)
            # Fields are described in the docstring of their class, where their names do not suffice.
            missing += [f"{name}.{one.name}" for one in members if one.kind != "field" and not one.docstring]
    assert not missing


def test_every_public_parameter_result_and_attribute_is_annotated() -> None:
    missing = []
    for module_name, name, value in public_objects():
        for path, function in functions(value):
            signature = inspect.signature(function)
            parameters = list(signature.parameters.values())[1 if "." in path else 0 :]
            if signature.return_annotation is signature.empty:
                missing.append(f"{module_name}.{path}")
            missing += [
                f"{module_name}.{path}({parameter.name})"
                for parameter in parameters
                if parameter.annotation is parameter.empty
            ]
        if inspect.isclass(value) and not issubclass(value, enum.Enum):
            missing += [
                f"{module_name}.{name}.{member.name}"
                for member in public_api.members(value)
                if member.kind == "attribute" and ":" not in member.declaration
            ]
    assert not missing
