"""Structural rules of the source tree, checked from its syntax: `python -m tools.structure [--report]`.

Rules, each a section of the output:

* no import cycle; imports for type checking and imports inside functions count;
* no function takes an object of a class from another module as its first parameter and touches its private
  attributes, or assigns to its attributes;
* no base class with a single subclass (exceptions and protocols are exempt);
* no identifier and no first line of a docstring uses a word that `docs/reference/glossary.md` replaces, in tests too;
* no module sets a callback or part of an object of another module after its construction (`tools/late_slots.py`);
* no stored exception keeps a traceback, and no exception is raised while a local or a stored value refers to it
  (`tools/stored_exceptions.py`).

Exit status 1 where a rule is broken; `--report` prints the figures as well.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from tools import late_slots, stored_exceptions

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

SOURCE = Path(__file__).resolve().parent.parent / "src"
TESTS = SOURCE.parent / "tests"

REPLACEMENTS = {
    "anew": "again",
    "chore": "maintenance",
    "chores": "maintenance",
    "crowd": "clients",
    "door": "listener or protocol",
    "doors": "listeners or protocols",
    "heard": "received",
    "horizon": "bound",
    "housekeeping": "maintenance",
    "keeper": "manager",
    "lane": "channel or key queue",
    "ledger": "flush state",
    "leftovers": "orphaned directories",
    "letters": "dead-lettered records",
    "nobody": "no broker, no member or no client",
    "patience": "failure detector",
    "residence": "replica manager",
    "riddle": "problem",
    "road": "path",
    "said": "acknowledged or returned",
    "says": "states or returns",
    "salvage": "bad records",
    "settle": "acknowledge",
    "settles": "acknowledges",
    "settling": "acknowledging",
    "shortage": "under min.insync.replicas",
    "somebody": "a client or a broker",
    "stretch": "range",
    "stretches": "ranges",
    "surroundings": "dependencies",
    "tells": "reports",
    "told": "reported",
    "trimming": "delete records",
    "trouble": "storage health",
    "twin": "blocking proxy",
    "twins": "blocking proxies",
    "upkeep": "maintenance",
    "whoever": "the caller",
    "whom": "which client or broker",
}
"""Words that the project does not use, with the term to use instead."""

ALLOWED: dict[str, frozenset[str]] = {
    "mansio/iceberg/archive/table_format.py": frozenset({"lane"}),  # a column of the archive's format
}
"""Words that a module may use because a protocol or a library does: path below `src` -> words."""

TERMS = frozenset({("dead", "letters"), ("delete", "horizon")})
"""Terms of other systems that contain a replaced word: dead letters of SQS and Kafka, the delete horizon of KIP-534."""

_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
_PLAIN_BASES = frozenset({"Protocol", "NamedTuple", "TypedDict", "Enum", "IntEnum", "StrEnum", "IntFlag"})


class Module(NamedTuple):
    """One parsed module: its dotted name, its path below `src`, and its syntax tree."""

    name: str
    path: str
    tree: ast.Module
    lines: int


class ClassDefinition(NamedTuple):
    """A class, where it is defined, and its bases: dotted where they come from the project, as written elsewhere."""

    name: str
    module: str
    bases: tuple[str, ...]

    @property
    def full_name(self) -> str:
        """Module and name."""
        return f"{self.module}.{self.name}"


def modules(source: Path = SOURCE) -> list[Module]:
    """Every module below `source`, generated ones excepted."""
    found = []
    for path in sorted(source.rglob("*.py")):
        if path.name.endswith("_pb2.py"):
            continue
        text = path.read_text()
        relative = path.relative_to(source)
        parts = relative.with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found.append(Module(name, str(relative), ast.parse(text), text.count("\n")))
    return found


def imports_of(module: Module, names: frozenset[str]) -> set[str]:
    """The modules of the project that `module` imports, anywhere in its text."""
    found: set[str] = set()
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            found.update(_known(alias.name, names) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            origin = _origin(module, node)
            for alias in node.names:
                full = f"{origin}.{alias.name}"
                found.add(full if full in names else _known(origin, names))
    return found - {"", module.name}


def _origin(module: Module, node: ast.ImportFrom) -> str:
    """The absolute name of what `node` imports from."""
    if not node.level:
        return node.module or ""
    parts = module.name.split(".")
    if not module.path.endswith("__init__.py"):
        parts.pop()
    parents = parts[: len(parts) - node.level + 1]
    return ".".join([*parents, node.module] if node.module else parents)


def _known(dotted: str, names: frozenset[str]) -> str:
    return dotted if dotted in names else ""


def cycles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Strongly connected components of more than one module, largest first (Tarjan, iterative)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    on_stack: set[str] = set()
    found: list[list[str]] = []
    for root in sorted(graph):
        if root in index:
            continue
        work: list[tuple[str, Iterator[str]]] = [(root, iter(sorted(graph[root])))]
        index[root] = low[root] = len(index)
        stack.append(root)
        on_stack.add(root)
        while work:
            node, following = work[-1]
            for other in following:
                if other not in graph:
                    continue
                if other not in index:
                    index[other] = low[other] = len(index)
                    stack.append(other)
                    on_stack.add(other)
                    work.append((other, iter(sorted(graph[other]))))
                    break
                if other in on_stack:
                    low[node] = min(low[node], index[other])
            else:
                work.pop()
                if work:
                    low[work[-1][0]] = min(low[work[-1][0]], low[node])
                if low[node] == index[node]:
                    component = []
                    while True:
                        member = stack.pop()
                        on_stack.discard(member)
                        component.append(member)
                        if member == node:
                            break
                    if len(component) > 1:
                        found.append(sorted(component))
    return sorted(found, key=len, reverse=True)


def classes(tree: list[Module]) -> list[ClassDefinition]:
    """Every class of the project."""
    names = {module.name for module in tree}
    found = []
    for module in tree:
        nodes = [node for node in ast.walk(module.tree) if isinstance(node, ast.ClassDef)]
        origins = {node.name: f"{module.name}.{node.name}" for node in nodes}
        for node in ast.walk(module.tree):
            if isinstance(node, ast.ImportFrom) and (origin := _origin(module, node)) in names:
                origins.update({alias.asname or alias.name: f"{origin}.{alias.name}" for alias in node.names})
        for node in nodes:
            bases = tuple(origins.get(name := _base_name(base), name) for base in node.bases)
            found.append(ClassDefinition(node.name, module.name, bases))
    return found


def _base_name(node: ast.expr) -> str:
    if isinstance(node, ast.Subscript):
        return _base_name(node.value)
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def single_subclasses(defined: list[ClassDefinition]) -> list[str]:
    """Base classes of the project with exactly one subclass, exceptions and protocols excepted."""
    by_name = {each.full_name: each for each in defined}

    def is_exempt(name: str) -> bool:
        if name not in by_name:
            return name in _PLAIN_BASES or name.endswith(("Error", "Exception"))
        return any(is_exempt(base) for base in by_name[name].bases)

    children: dict[str, list[str]] = defaultdict(list)
    for each in defined:
        for base in each.bases:
            if base in by_name and base != each.full_name:
                children[base].append(each.full_name)
    return [
        f"{base}: its only subclass is {subclasses[0]}"
        for base, subclasses in sorted(children.items())
        if len(subclasses) == 1 and not is_exempt(base)
    ]


NAMED_TUPLE_METHODS = frozenset({"_asdict", "_fields", "_make", "_replace"})
"""Public in spite of the underscore, which keeps them apart from fields."""


def owners_as_arguments(tree: list[Module], defined: list[ClassDefinition]) -> list[str]:
    """Functions whose first parameter is an object of another module's class and whose body touches its insides."""
    home: dict[str, set[str]] = defaultdict(set)
    for each in defined:
        home[each.name].add(each.module)
    found = []
    for module in tree:
        for node in module.tree.body:
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or not node.args.args:
                continue
            first = node.args.args[0]
            owner = _base_name(first.annotation) if first.annotation is not None else ""
            if owner not in home or module.name in home[owner]:
                continue
            touched = sorted(set(_insides(node, first.arg)))
            if touched:
                where = f"{module.path}:{node.lineno}"
                found.append(f"{where} {node.name}({first.arg}: {owner}) touches {', '.join(touched)}")
    return found


def _insides(function: ast.AST, name: str) -> Iterator[str]:
    for node in ast.walk(function):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == name:
            is_public = not node.attr.startswith("_") or node.attr in NAMED_TUPLE_METHODS
            is_private = not is_public and not node.attr.startswith("__")
            if is_private or isinstance(node.ctx, ast.Store):
                yield node.attr


def words(identifier: str) -> list[str]:
    """The words of an identifier or text, in lower case: `HandOut` and `hand_out` are `hand`, `out`.

    The second word of each pair in `TERMS` is left out.
    """
    found = [word.lower() for word in _WORD.findall(identifier)]
    return [word for before, word in zip(["", *found], found, strict=False) if (before, word) not in TERMS]


def vocabulary(tree: list[Module]) -> list[str]:
    """Identifiers and first lines of docstrings that use a replaced word."""
    found = []
    for module in tree:
        allowed = ALLOWED.get(module.path, frozenset())
        for line, kind, text in sorted(_named(module)):
            found += [
                f"{module.path}:{line} {kind} {text!r}: not {word!r} but {REPLACEMENTS[word]}"
                for word in words(text)
                if word in REPLACEMENTS and word not in allowed
            ]
    return found


def _named(module: Module) -> Iterable[tuple[int, str, str]]:
    yield from ((1, "module", part) for part in module.name.rpartition(".")[2:])
    for node in ast.walk(module.tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.lineno, "name", node.name
        if isinstance(node, ast.arg):
            yield node.lineno, "parameter", node.arg
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, "name", node.id
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.lineno, "attribute", node.attr
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            docstring = ast.get_docstring(node)
            if docstring:
                line = 1 if isinstance(node, ast.Module) else node.lineno
                yield line, "docstring", docstring.split("\n", 1)[0]


def exceptions_as_values(tree: list[Module]) -> dict[str, list[str]]:
    """Exceptions that are stored with their traceback, or raised although something refers to them."""
    names = stored_exceptions.exception_names(module.tree for module in tree)
    checked = [module for module in tree if not module.path.startswith(tuple(stored_exceptions.KEPT))]
    return {
        "stored exception": [
            f"{module.path}:{line}: {text}"
            for module in checked
            for line, text in stored_exceptions.stored_exceptions(module.tree, names)
        ],
        "raised value": [
            f"{module.path}:{line}: {text}"
            for module in checked
            for line, text in stored_exceptions.raised_values(module.tree)
        ],
    }


def findings(source: Path = SOURCE, tests: Path = TESTS) -> dict[str, list[str]]:
    """Rule -> what breaks it. Of `tests` only the vocabulary is checked; paths are below `source` or `tests`."""
    tree = modules(source)
    names = frozenset(module.name for module in tree)
    defined = classes(tree)
    return {
        "import cycle": [
            f"{len(each)} modules: {', '.join(each)}"
            for each in cycles({module.name: imports_of(module, names) for module in tree})
        ],
        "owner as argument": owners_as_arguments(tree, defined),
        "single subclass": single_subclasses(defined),
        "vocabulary": vocabulary(tree) + vocabulary(modules(tests)),
        "late slot": late_slots.late_slots({module.path: module.tree for module in tree}),
        **exceptions_as_values(tree),
    }


def main() -> None:
    """Print what breaks a rule; exit with 1 where anything does."""
    found = findings()
    for rule, items in found.items():
        for item in items:
            print(f"{rule}: {item}")
    if "--report" in sys.argv[1:]:
        tree = modules()
        print(f"{len(tree)} files, {sum(module.lines for module in tree)} lines")
        for rule, items in found.items():
            print(f"{rule}: {len(items)}")
    sys.exit(1 if any(found.values()) else 0)


if __name__ == "__main__":
    main()
