"""Random JSON Schemas, schemas that evolved from them, and values: one seed, one pair."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from random import Random

NAMES: Final = ("a", "b", "c", "d", "x-1", "x-2")
_PATTERNS: Final = ("^a", "b$", "^[a-z]+$")


def schema(random: Random, depth: int = 3) -> Any:
    """Return a schema of draft 7."""
    if random.random() < 0.05:
        unrestricted: list[Any] = [True, {}]
        return random.choice(unrestricted)
    if depth <= 0 or random.random() < 0.45:
        return _scalar(random)
    kind = random.choice(("object", "object", "object", "array", "tuple", "anyOf", "allOf", "oneOf", "types"))
    if kind == "object":
        return _object(random, depth)
    if kind == "array":
        return {"type": "array", "items": schema(random, depth - 1), **_sizes(random, "Items")}
    if kind == "tuple":
        items = [schema(random, depth - 1) for _ in range(random.randint(1, 3))]
        made: dict[str, Any] = {"type": "array", "items": items}
        if random.random() < 0.6:
            others: list[Any] = [False, {"type": "string"}]
            made["additionalItems"] = random.choice(others)
        return made
    if kind == "types":
        return {"type": random.sample(["string", "integer", "null", "boolean"], 2)}
    if kind == "oneOf":  # alternatives without a value in common
        return {"oneOf": [{"type": "string"}, _object(random, depth - 1), {"type": "integer", "minimum": 0}]}
    return {kind: [schema(random, depth - 1) for _ in range(random.randint(1, 3))]}


def pair(random: Random) -> tuple[Any, Any]:
    """Return a schema of an object, and a schema that evolved from it by one to three changes."""
    old = _object(random, 3)
    new = copy.deepcopy(old)
    for _ in range(random.randint(1, 3)):
        _change(random.choice(_schemas(new)), random)
    return old, new


def _scalar(random: Random) -> Any:
    kind = random.choice(("string", "integer", "number", "boolean", "null", "enum", "const"))
    if kind == "enum":
        return {"enum": random.sample(["u", "v", 1, 2.5, None, True], random.randint(1, 4))}
    if kind == "const":
        return {"const": random.choice(["u", 1, None])}
    made: dict[str, Any] = {"type": kind}
    if kind == "string":
        made |= _sizes(random, "Length")
        if random.random() < 0.2:
            made["pattern"] = random.choice(_PATTERNS)
    if kind in ("integer", "number"):
        for keyword in random.sample(
            ["minimum", "maximum", "exclusiveMinimum", "multipleOf"], random.randint(0, 2)
        ):
            made[keyword] = random.randint(1, 4)
    return made


def _sizes(random: Random, suffix: str) -> dict[str, int]:
    found = {}
    if random.random() < 0.25:
        found[f"min{suffix}"] = random.randint(0, 2)
    if random.random() < 0.25:
        found[f"max{suffix}"] = random.randint(2, 4)
    return found


def _object(random: Random, depth: int) -> dict[str, Any]:
    names = random.sample(NAMES, random.randint(1, 4))
    made: dict[str, Any] = {
        "type": "object",
        "properties": {name: schema(random, depth - 1) for name in names},
    }
    required = [name for name in names if random.random() < 0.4]
    if required:
        made["required"] = required
    choice = random.random()
    if choice < 0.35:
        made["additionalProperties"] = False
    elif choice < 0.5:
        made["additionalProperties"] = _scalar(random)
    if random.random() < 0.15:
        made["patternProperties"] = {"^x-": _scalar(random)}
    if random.random() < 0.1:
        made["dependencies"] = {names[0]: [random.choice(NAMES)]}
    if random.random() < 0.1:
        made["propertyNames"] = {"maxLength": random.randint(1, 3)}
    return made | _sizes(random, "Properties")


def _schemas(root: Any) -> list[Any]:
    """Objects that are schemas."""
    found, waiting = [], [root]
    while waiting:
        node = waiting.pop()
        if not isinstance(node, dict):
            continue
        found.append(node)
        for keyword in ("properties", "patternProperties"):
            waiting.extend(node.get(keyword, {}).values())
        for keyword in ("items", "additionalProperties", "anyOf", "allOf", "oneOf"):
            part = node.get(keyword)
            waiting.extend(part if isinstance(part, list) else [part])
    return found


def _change(node: dict[str, Any], random: Random) -> None:
    if node.get("type") == "object" and random.random() < 0.7:
        _change_object(node, random)
        return
    choice = random.random()
    alternatives = next((node[key] for key in ("anyOf", "oneOf") if key in node), None)
    if alternatives is not None and "oneOf" not in node and choice < 0.6:
        alternatives.append(_scalar(random))
    elif "enum" in node:
        node["enum"] = [*node["enum"], "new"] if choice < 0.6 else node["enum"][1:] or ["new"]
    elif choice < 0.4 and set(node) - {"type", "properties", "items", "anyOf", "allOf", "oneOf", "const"}:
        gone = random.choice(
            sorted(set(node) - {"type", "properties", "items", "anyOf", "allOf", "oneOf", "const"})
        )
        del node[gone]
    elif choice < 0.7 and isinstance(node.get("type"), str):
        node["type"] = {"integer": "number", "null": "null"}.get(node["type"], [node["type"], "null"])
    elif node.get("type") == "string":
        node[random.choice(("minLength", "maxLength"))] = random.randint(0, 4)
    elif node.get("type") in ("integer", "number"):
        node[random.choice(("minimum", "maximum"))] = random.randint(0, 5)


def _change_object(node: dict[str, Any], random: Random) -> None:
    choice = random.random()
    properties = node["properties"]
    if choice < 0.35:
        name = random.choice(NAMES)
        if name not in properties:
            properties[name] = _scalar(random)
            if random.random() < 0.2:
                node.setdefault("required", []).append(name)
    elif choice < 0.55 and len(properties) > 1:
        gone = random.choice(sorted(properties))
        del properties[gone]
        if random.random() < 0.7 and gone in node.get("required", ()):
            node["required"].remove(gone)
    elif choice < 0.7 and node.get("required"):
        node["required"].pop()
    elif choice < 0.85:
        node["additionalProperties"] = random.choice((True, False, {"type": "string"}))
    else:
        node["maxProperties"] = random.randint(2, 6)


def value(random: Random, node: Any, depth: int = 0) -> Any:
    """Return a value that is often valid."""
    if not isinstance(node, dict) or not node or depth > 6:
        return random.choice((None, True, 0, 2.5, "a", "bb", [], {}, {"d": 1}))
    if "enum" in node:
        return random.choice(node["enum"])
    if "const" in node:
        return node["const"]
    for keyword in ("anyOf", "allOf", "oneOf"):
        if keyword in node:
            return value(random, random.choice(node[keyword]), depth + 1)
    kind = node.get("type", "object")
    kind = random.choice(kind) if isinstance(kind, list) else kind
    if kind == "object":
        return _object_value(random, node, depth)
    if kind == "array":
        items = node.get("items", True)
        if isinstance(items, list):
            more = [node.get("additionalItems", True)] * random.randint(0, 2)
            return [value(random, item, depth + 1) for item in (items + more)[: random.randint(0, 5)]]
        return [value(random, items, depth + 1) for _ in range(random.randint(node.get("minItems", 0), 4))]
    values = {
        "string": ("", "a", "ab", "abc", "b", "bbbb"),
        "integer": range(-1, 14),
        "number": (-1, 0, 0.5, 1, 1.5, 2, 2.5, 3, 4, 4.5, 8, 12),
        "boolean": (True, False),
        "null": (None,),
    }
    return random.choice(values[kind])


def _object_value(random: Random, node: dict[str, Any], depth: int) -> dict[str, Any]:
    properties, required = node.get("properties", {}), node.get("required", ())
    made = {
        name: value(random, part, depth + 1)
        for name, part in properties.items()
        if name in required or random.random() < 0.6
    }
    for name in NAMES:
        if name not in properties and random.random() < 0.3:
            made[name] = value(random, node.get("additionalProperties", True), depth + 1)
    return made
