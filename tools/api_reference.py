"""docs/reference/api/: the reference of the public Python modules, made from their signatures and docstrings."""

from __future__ import annotations

import importlib
import inspect
import re
from functools import partial
from typing import TYPE_CHECKING, Any

from mansio.errors import MansioError
from tools import public_api

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

LINE_LENGTH = 110
BLOCKING = "mansio.blocking"

PREFACE = """\
# Python API

The public modules are `mansio`, `mansio.blocking`, `mansio.errors`, `mansio.serde`, `mansio.spark`,
`mansio.spark.functions` and `mansio.testing`, with the names below.
**Everything else is private**, also where its name has no underscore, and may change in any release: other modules,
other names, constructors that are not shown (the objects come from methods), and fields that a later version adds.

All of it has type annotations. Times are in milliseconds where a name ends in `_ms`, sizes in bytes where it ends in
`_bytes_max`. Errors are subclasses of [`MansioError`](errors.md#errors).

These pages are generated from the modules by `make format`.
"""
ERRORS = """\
`except errors.Unavailable` catches what a retry can change, `except errors.RequestError` what it cannot. *Code* is
the Kafka error code that clients of other languages get, *HTTP* the status of the HTTP listener, *retry* whether the
same request may succeed later. `str(error)` is one line.
"""


def pages() -> dict[str, Callable[[], str]]:
    """File name -> what makes its content: a page for each public module, and `index.md` with all names."""
    modules = {_page(module_name): partial(_module, module_name) for module_name in public_api.MODULES}
    return {"index.md": lambda: f"{PREFACE}\n{_contents()}", **modules}


def _module(module_name: str) -> str:
    parts = [f"# `{module_name}`\n"]
    if module_name == "mansio.errors":
        parts += [ERRORS, *_errors(), *_entries(module_name)]
    else:
        entries = _blocking_entries() if module_name == BLOCKING else _entries(module_name)
        parts += [_text(importlib.import_module(module_name).__doc__), *entries]
    return "\n".join(parts)


def _page(module_name: str) -> str:
    return module_name.removeprefix("mansio.").replace(".", "-") + ".md"


def _link(module_name: str, name: str) -> str:
    """The address of an entry, from another page of the reference."""
    anchor = re.sub(r"[^a-z0-9_]", "", _heading(module_name, name).lower())
    return f"{_page(module_name)}#{anchor}"


def _contents() -> str:
    lines = []
    for module_name in public_api.MODULES:
        names = [
            f"[`{name}`]({_link(module_name, name)})"
            for name, value in public_api.public_objects(module_name).items()
            if not public_api.is_error(value)
        ]
        if module_name == "mansio.errors":
            names.insert(0, f"[errors]({_page(module_name)}#errors)")
        lines.append(f"* [`{module_name}`]({_page(module_name)}): {', '.join(names)}")
    return "\n".join(lines) + "\n"


def _heading(module_name: str, name: str) -> str:
    return f"{module_name}.{name}"


def _entries(module_name: str) -> Iterator[str]:
    for name, value in public_api.public_objects(module_name).items():
        if public_api.is_error(value):
            continue
        yield f"## {_heading(module_name, name)}\n"
        if inspect.isclass(value):
            yield from _class(name, value)
        elif inspect.isfunction(value):
            prefix = "async def" if public_api.is_coroutine(value) else "def"
            yield _code([f"{prefix} {name}{public_api.signature(value)}"])
            yield _text(inspect.getdoc(value))
        else:
            module, own_name = public_api.defining_module(module_name, name)
            yield _code([public_api.constant_declaration(module, own_name)])
            yield _text(public_api.constant_docstring(module, own_name))
    errors = [kind for kind in public_api.public_objects(module_name).values() if public_api.is_error(kind)]
    if errors and module_name not in {"mansio", "mansio.errors"}:
        yield f"## Errors of {module_name}\n"
        yield _error_table(errors)


def _class(name: str, kind: type) -> Iterator[str]:
    members = public_api.members(kind)
    fields = [member for member in members if member.kind == "field"]
    if kind.__name__ in public_api.CONSTRUCTED:
        initializer: Any = getattr(kind, "__init__")  # noqa: B009  # mypy: a subclass may have another one
        yield _code([f"class {name}{public_api.signature(initializer, is_method=True).partition(' ->')[0]}"])
    elif fields:
        base = "(Message)" if kind.__bases__[0].__name__ == "Message" else ""
        yield _code([f"class {name}{base}:", *(f"    {member.declaration}" for member in fields)])
    yield _text(inspect.getdoc(kind))
    syntax = public_api.syntax(kind)
    if syntax:
        yield f"Supports {', '.join(syntax)}.\n"
    documented = [f"* `{member.name}`: {_joined(member.docstring)}" for member in fields if member.docstring]
    if documented:
        yield "\n".join(documented) + "\n"
    values = [member for member in members if member.kind in {"attribute", "property"}]
    if values:
        yield "\n".join(f"* `{member.declaration}`: {_joined(member.docstring)}" for member in values) + "\n"
    for member in members:
        if member.kind == "method":
            yield f"### `{name}.{member.name}`\n"
            yield _code([member.declaration])
            yield _text(member.docstring)


def _blocking_entries() -> Iterator[str]:
    """Signatures, with a link to the asyncio counterpart, which has the description."""
    counterparts = public_api.public_objects("mansio")
    for name, value in public_api.public_objects(BLOCKING).items():
        if public_api.is_error(value):
            continue
        yield f"## {_heading(BLOCKING, name)}\n"
        link = f"[`mansio.{name}`]({_link('mansio', name)})"
        if inspect.isclass(value):
            yield f"{_joined(inspect.getdoc(value))} The asyncio class, with descriptions: {link}.\n"
            inherited = {member.name for member in public_api.members(counterparts["Message"])}
            members = [member for member in public_api.members(value) if member.name not in inherited]
            yield _code([member.declaration for member in members])
            syntax = public_api.syntax(value)
            if syntax:
                yield f"Supports {', '.join(syntax)}.\n"
            own = {member.name: member for member in public_api.members(counterparts[name])}
            different = [
                f"* `{member.name}`: {_joined(member.docstring)}\n"
                for member in members
                if member.docstring != own[member.name].docstring and "; see" not in member.docstring
            ]
            if different:
                yield "".join(different)
        elif inspect.isfunction(value):
            yield _code([f"def {name}{public_api.signature(value)}"])
            yield f"Connected when it returns; otherwise as {link}.\n"
        else:
            module, own_name = public_api.defining_module(BLOCKING, name)
            yield _code([public_api.constant_declaration(module, own_name)])
            yield _text(public_api.constant_docstring(module, own_name))
    errors = [kind for kind in public_api.public_objects(BLOCKING).values() if public_api.is_error(kind)]
    yield "\n".join(f"`{kind.__name__}`: {_joined(inspect.getdoc(kind))}\n" for kind in errors)


def _errors() -> Iterator[str]:
    yield "## Errors\n"
    objects = public_api.public_objects("mansio.errors")
    yield _error_table([kind for kind in objects.values() if public_api.is_error(kind)])


def _error_table(kinds: list[Any]) -> str:
    lines = ["| error | base | code | HTTP | retry | meaning |", "|---|---|---|---|---|---|"]
    for kind in sorted(kinds, key=lambda kind: kind.__name__):
        is_error_of_mansio = issubclass(kind, MansioError)  # others are raised by users
        retry = "yes" if is_error_of_mansio and kind.retriable else ""
        codes = f"{kind.kafka_code} | {kind.http_status}" if is_error_of_mansio else " | "
        base = kind.__bases__[0].__name__
        meaning = _joined(inspect.getdoc(kind)).replace("|", "\\|")
        for member in public_api.members(kind):
            if member.docstring and member.name in vars(kind) and kind.__name__ != "MansioError":
                meaning += f" `{member.name}`: {_joined(member.docstring)}"
        lines.append(f"| `{kind.__name__}` | `{base}` | {codes} | {retry} | {meaning} |")
    return "\n".join(lines) + "\n"


def _code(lines: list[str]) -> str:
    return "```python\n" + "\n".join(_wrapped(line) for line in lines) + "\n```\n"


def _wrapped(line: str) -> str:
    """A signature with one parameter per line where it is too long."""
    if len(line) <= LINE_LENGTH or "(" not in line:
        return line
    start, _, rest = line.partition("(")
    depth, parts, part, end = 1, [], "", ""
    for index, character in enumerate(rest):
        depth += (character in "([{") - (character in ")]}")
        if depth == 0:
            end = rest[index:]
            break
        if character == "," and depth == 1:
            parts.append(part.strip())
            part = ""
        else:
            part += character
    parts.append(part.strip())
    return "\n".join([f"{start}(", *(f"    {one}," for one in parts), end])


def _joined(docstring: str | None) -> str:
    return " ".join((docstring or "").split())


def _text(docstring: str | None) -> str:
    """A docstring as Markdown: examples as code, the errors of `Raises:` as a list."""
    lines, in_raises, in_example = [], False, False
    for line in inspect.cleandoc(docstring or "").splitlines():
        is_example = line.startswith((">>>", "..."))
        if is_example != in_example:
            lines.append("```python" if is_example else "```")
            in_example = is_example
        if is_example:
            lines.append(line[4:])
        elif line == "Raises:":
            in_raises = True
            lines += ["Raises:", ""]
        elif in_raises and line.startswith("    "):
            lines.append(
                re.sub(r"^    (\w[\w, ]*): ", r"* `\1`: ", line) if ": " in line else f"  {line.strip()}"
            )
        else:
            in_raises = False
            is_list = line.startswith("* ")
            if is_list and lines and lines[-1] and not lines[-1].startswith(("* ", "  ")):
                lines.append("")
            lines.append(line)
    if in_example:
        lines.append("```")
    return "\n".join(lines) + "\n"
