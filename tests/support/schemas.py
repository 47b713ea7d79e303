"""Random JSON schemas of bounded texts, and a check of values against them."""

import random
from typing import Any

KINDS = ("string", "integer", "boolean", "null", "enum", "const", "array", "object", "anyOf", "pattern")


def random_schema(chance: random.Random, depth: int = 2) -> dict[str, Any]:
    """Return a schema whose texts are all short, so that any of them ends within few tokens."""
    kind = chance.choice(KINDS if depth else KINDS[:6])
    if kind == "string":
        least = chance.randrange(3)
        return {"type": "string", "minLength": least, "maxLength": least + chance.randrange(4)}
    if kind == "pattern":
        return {"type": "string", "pattern": chance.choice(["^[a-c]{1,4}$", "^(yes|no)$", "^x[0-9]{2}$"])}
    if kind == "integer":
        least = chance.randrange(-20, 20)
        return {"type": "integer", "minimum": least, "maximum": least + chance.randrange(30)}
    if kind == "enum":
        return {"enum": chance.sample(["red", "gréen", 7, -1, None, True, "a b"], 3)}
    if kind == "const":
        return {"const": chance.choice(["only", 12, False, None])}
    if kind == "array":
        least = chance.randrange(2)
        items = random_schema(chance, depth - 1)
        return {"type": "array", "items": items, "minItems": least, "maxItems": least + chance.randrange(3)}
    if kind == "object":
        return _random_object(chance, depth)
    if kind == "anyOf":
        return {"anyOf": [random_schema(chance, depth - 1) for _ in range(2)]}
    return {"type": kind}


def _random_object(chance: random.Random, depth: int) -> dict[str, Any]:
    names = chance.sample(["name", "age", "ü", "with space", "x"], chance.randrange(1, 4))
    properties = {name: random_schema(chance, depth - 1) for name in names}
    required = [name for name in names if chance.random() < 0.6]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def fits(value: Any, schema: dict[str, Any]) -> bool:
    """Return whether a value is what such a schema describes."""
    if "anyOf" in schema:
        return any(fits(value, one) for one in schema["anyOf"])
    if "enum" in schema or "const" in schema:
        allowed = schema.get("enum", [schema.get("const")])
        return any(type(value) is type(one) and value == one for one in allowed)
    return _has_type(value, schema["type"]) and _fits_type(value, schema)


def _has_type(value: Any, name: str) -> bool:
    kinds = {"string": str, "integer": int, "boolean": bool, "null": type(None), "array": list, "object": dict}
    return type(value) is kinds[name]


def _fits_type(value: Any, schema: dict[str, Any]) -> bool:
    if isinstance(value, str):
        if "pattern" in schema:
            import re

            return re.search(schema["pattern"], value) is not None
        return schema["minLength"] <= len(value) <= schema["maxLength"]
    if type(value) is int:
        return schema["minimum"] <= value <= schema["maximum"]
    if isinstance(value, list):
        return schema["minItems"] <= len(value) <= schema["maxItems"] and all(
            fits(one, schema["items"]) for one in value
        )
    if isinstance(value, dict):
        return set(schema["required"]) <= set(value) <= set(schema["properties"]) and all(
            fits(one, schema["properties"][name]) for name, one in value.items()
        )
    return True
