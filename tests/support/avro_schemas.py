"""Random Avro schemas, schemas that evolved from them, and values: one seed, one pair."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from random import Random

PRIMITIVES: Final = ("null", "boolean", "int", "long", "float", "double", "bytes", "string")
_DEFAULTS: Final = {
    "null": None,
    "boolean": True,
    "int": 1,
    "long": 2,
    "float": 1.5,
    "double": 2.5,
    "bytes": "\u00ff",
    "string": "text",
}
_PROMOTIONS: Final = {
    "int": ("long", "float", "double"),
    "long": ("float", "double"),
    "float": ("double",),
    "string": ("bytes",),
    "bytes": ("string",),
}


class SchemaGenerator:
    """Generator of a schema. Named types have unique names, so that a union has each name once."""

    def __init__(self, random: Random) -> None:
        self._random = random
        self._names = 0
        self._records: list[str] = []

    def record(self, depth: int = 3) -> dict[str, Any]:
        """Return a record with up to five fields, some of them of the records that contain it."""
        name = self._new_name("R")
        self._records.append(name)
        fields = [self._field(index, depth) for index in range(self._random.randint(1, 5))]
        self._records.pop()
        made: dict[str, Any] = {"type": "record", "name": name, "fields": fields}
        if self._random.random() < 0.3 and "." not in name:
            made["namespace"] = ""
        return made

    def type(self, depth: int) -> Any:
        """Return a type of any kind, nested up to `depth` levels."""
        if depth <= 0 or self._random.random() < 0.4:
            return self._random.choice(PRIMITIVES)
        kind = self._random.choice(("record", "enum", "fixed", "array", "map", "union", "union", "recursion"))
        if kind == "record":
            return self.record(depth - 1)
        if kind == "enum":
            return self._enum()
        if kind == "fixed":
            return {"type": "fixed", "name": self._new_name("F"), "size": self._random.choice((0, 2, 4))}
        if kind == "array":
            return {"type": "array", "items": self.type(depth - 1)}
        if kind == "map":
            return {"type": "map", "values": self.type(depth - 1)}
        if kind == "recursion" and self._records:
            return ["null", self._random.choice(self._records)]
        return self._union(depth)

    def _union(self, depth: int) -> list[Any]:
        branches: list[Any] = []
        kinds: set[str] = set()
        for _ in range(self._random.randint(1, 4)):
            branch = self.type(depth - 1)
            key = kind_of(branch)
            if key != "union" and key not in kinds:
                kinds.add(key)
                branches.append(branch)
        return branches or ["null"]

    def _field(self, index: int, depth: int) -> dict[str, Any]:
        made = {"name": f"f{index}", "type": self.type(depth - 1)}
        if self._random.random() < 0.4:
            default = default_of(made["type"])
            if default is not None or made["type"] == "null":
                made["default"] = default
        return made

    def _enum(self) -> dict[str, Any]:
        symbols = [f"S{index}" for index in range(self._random.randint(1, 4))]
        made: dict[str, Any] = {"type": "enum", "name": self._new_name("E"), "symbols": symbols}
        if self._random.random() < 0.3:
            made["default"] = self._random.choice(symbols)
        return made

    def _new_name(self, prefix: str) -> str:
        self._names += 1
        return f"{self._random.choice(('', 'a.b.'))}{prefix}{self._names}"


def kind_of(schema: Any) -> str:
    """What a union may have once: the name of a named type, else the kind."""
    if isinstance(schema, list):
        return "union"
    if isinstance(schema, dict):
        return schema.get("name") or schema["type"]
    return schema


def default_of(schema: Any) -> Any:
    """Return a default value of a type; None if it has parts."""
    if isinstance(schema, str):
        return _DEFAULTS.get(schema)
    if isinstance(schema, dict):
        empty = {"array": [], "map": {}, "fixed": "\u0000" * schema.get("size", 0)}
        if schema["type"] == "enum":
            return schema["symbols"][0]
        return empty.get(schema["type"])
    return None


def evolved(schema: dict[str, Any], random: Random) -> dict[str, Any]:
    """Return a copy of a record with one to three changes, compatible and incompatible ones."""
    changed = copy.deepcopy(schema)
    for _ in range(random.randint(1, 3)):
        _change(random.choice(_nodes(changed)), random)
    return changed


def _nodes(schema: Any) -> list[Any]:
    """Objects and arrays of a schema: its types, unions and fields."""
    found: list[Any] = []
    waiting = [schema]
    while waiting:
        node = waiting.pop()
        if isinstance(node, list):
            found.append(node)
            waiting.extend(node)
        elif isinstance(node, dict):
            found.append(node)
            waiting.extend(node[key] for key in ("type", "fields", "items", "values") if key in node)
    return [node for node in found if not isinstance(node, list) or not _is_fields(node)]


def _is_fields(node: list[Any]) -> bool:
    return (
        bool(node)
        and isinstance(node[0], dict)
        and "type" in node[0]
        and "symbols" not in node[0]
        and (str(node[0].get("name", "")).startswith("f") or str(node[0].get("name", "")).startswith("new"))
    )


def _change(node: Any, random: Random) -> None:
    if isinstance(node, list):
        _change_union(node, random)
    elif node.get("type") == "record":
        _change_record(node, random)
    elif node.get("type") == "enum":
        _change_enum(node, random)
    elif node.get("type") == "fixed":
        if random.random() < 0.5:
            node["size"] += 1
        else:
            _rename(node, random)
    else:
        part = next(key for key in ("items", "values", "type") if key in node)
        node[part] = _changed_type(node[part], random)
        node.pop("default", None)


def _changed_type(kind: Any, random: Random) -> Any:
    if isinstance(kind, str) and kind in _PROMOTIONS and random.random() < 0.6:
        return random.choice(_PROMOTIONS[kind])
    if not isinstance(kind, list) and random.random() < 0.5:
        return [kind, "null"] if kind != "null" else [kind, "string"]
    if isinstance(kind, str) and random.random() < 0.3:
        return random.choice(PRIMITIVES)
    return kind


def _change_union(node: list[Any], random: Random) -> None:
    choice = random.random()
    if choice < 0.4:
        free = [one for one in PRIMITIVES if one not in map(kind_of, node)]
        node.insert(random.randint(0, len(node)), random.choice(free))
    elif choice < 0.6 and isinstance(node[-1], str):
        node.pop()
        if not node:
            node.append("null")
    else:
        random.shuffle(node)
        # A name must be defined before it is used.
        node.sort(key=lambda branch: isinstance(branch, str) and branch not in PRIMITIVES)


def _change_record(node: dict[str, Any], random: Random) -> None:
    choice = random.random()
    fields = node["fields"]
    if choice < 0.4:
        kind = random.choice(PRIMITIVES)
        made: dict[str, Any] = {"name": f"new{len(fields)}", "type": kind}
        if random.random() < 0.7:
            made["default"] = _DEFAULTS[kind]
        if made["name"] not in [one["name"] for one in fields]:
            fields.insert(random.randint(0, len(fields)), made)
    elif choice < 0.6 and isinstance(fields[-1]["type"], str) and len(fields) > 1:
        fields.pop()
    elif choice < 0.8:
        field = random.choice(fields)
        if random.random() < 0.7:
            field["aliases"] = [field["name"]]
        field["name"] = f"new_{field['name']}"
    else:
        _rename(node, random)


def _rename(node: dict[str, Any], random: Random) -> None:
    """Rename a type that no other type refers to by name, with or without an alias, or only its namespace."""
    if node["type"] == "record":
        return
    name = node["name"]
    if random.random() < 0.3 and "." in name:
        node["name"] = name.replace("a.b.", "c.")
        return
    if random.random() < 0.7:
        node["aliases"] = [name.rpartition(".")[2] if random.random() < 0.5 else name]
    node["name"] = f"{name}New"


def _change_enum(node: dict[str, Any], random: Random) -> None:
    choice = random.random()
    symbols = node["symbols"]
    if choice < 0.4:
        symbols.append(f"T{len(symbols)}")
    elif choice < 0.8 and len(symbols) > 1:
        gone = symbols.pop(0)
        if node.get("default") == gone:
            del node["default"]
        if random.random() < 0.4:
            node["default"] = symbols[0]
    else:
        _rename(node, random)


class ValueGenerator:
    """Generator of values of a schema, in the form that fastavro takes."""

    def __init__(self, random: Random, schema: Any) -> None:
        self._random = random
        self._schema = schema
        self._named: dict[str, Any] = {}
        self._find_named(schema, "")

    def value(self) -> Any:
        return self._value(self._schema, "", 0)

    def _find_named(self, node: Any, namespace: str) -> None:
        if isinstance(node, list):
            for branch in node:
                self._find_named(branch, namespace)
        elif isinstance(node, dict):
            if "name" in node and node["type"] in ("record", "enum", "fixed"):
                name, namespace = _full_name(node, namespace)
                self._named[name] = node
            for key in ("items", "values", "type"):
                if not isinstance(node.get(key), str):
                    self._find_named(node.get(key), namespace)
            for field in node.get("fields", ()):
                self._find_named(field["type"], namespace)

    def _value(self, node: Any, namespace: str, depth: int) -> Any:
        if isinstance(node, list):
            return self._branch(node, namespace, depth)
        if isinstance(node, str) and node not in PRIMITIVES:
            name = node if "." in node or not namespace else f"{namespace}.{node}"
            return self._value(self._named[name], name.rpartition(".")[0], depth)
        if isinstance(node, str):
            return self._primitive(node)
        if node["type"] == "record":
            _, own = _full_name(node, namespace)
            return {each["name"]: self._value(each["type"], own, depth + 1) for each in node["fields"]}
        if node["type"] == "enum":
            return self._random.choice(node["symbols"])
        if node["type"] == "fixed":
            return bytes(node["size"])
        count = 0 if depth > 6 else self._random.randint(0, 2)
        if node["type"] == "array":
            return [self._value(node["items"], namespace, depth + 1) for _ in range(count)]
        return {f"k{index}": self._value(node["values"], namespace, depth + 1) for index in range(count)}

    def _branch(self, node: list[Any], namespace: str, depth: int) -> Any:
        branch = node[0] if depth > 6 else self._random.choice(node)
        name = branch if isinstance(branch, str) else branch["type"]
        if isinstance(branch, dict) and "name" in branch:
            name = _full_name(branch, namespace)[0]
        elif name not in PRIMITIVES and name not in ("array", "map"):
            name = name if "." in name or not namespace else f"{namespace}.{name}"
        return name, self._value(branch, namespace, depth)

    def _primitive(self, kind: str) -> Any:
        values = {
            "null": (None,),
            "boolean": (True, False),
            "int": (-(1 << 31), 0, (1 << 31) - 1),
            "long": (-(1 << 40), 0, 1 << 40),
            "float": (0.0, 1.5),
            "double": (0.0, 1e100),
            "bytes": (b"", b"bytes"),
            "string": ("", "\u00e9"),
        }
        return self._random.choice(values[kind])


def _full_name(node: dict[str, Any], namespace: str) -> tuple[str, str]:
    """Full name of a definition, and its namespace."""
    name = node["name"]
    space = node.get("namespace", namespace)
    full = name if "." in name or not space else f"{space}.{name}"
    return full, full.rpartition(".")[0]
