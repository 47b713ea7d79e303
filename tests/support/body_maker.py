"""BodyMaker: bodies of requests, drawn from the schema of the API's models: right ones, odd ones and wrong ones."""

import random
from typing import Any

from pydantic import BaseModel

TEXTS = [
    "",
    "x",
    "the fox",
    "a" * 200,
    "\0",
    "\ud7ff\U0001f600",
    "{{ 7*7 }}",
    "</s><s>",
    "null",
    "[1]",
    "\n \t",
    "-1",
    "%s%n",
]
NUMBERS = [0, 1, -1, 2, 3, 0.0, 0.5, 1.0, -0.5, 7.0, 100, 2**31, 2**63, -(2**63), 1e308, 10**30, 1e-320]
WORDS = ["text", "function", "json_object", "json_schema", "auto", "none", "required", "low", "0.1", "kv.pin", "1.0"]
PATTERNS = ["a", "[0-9]{1,3}", "(", "a{1000000}", "(a?){1000}a{1000}", "\\p{L}+", "(?=x)", ".*", "x|", "[^\\x00-\\x7f]"]
GRAMMARS = ['root ::= "a" | "b"', 'start: "a" | "b"', 'start: start "a" |', "root ::= root", "start: /[/", "%import x"]
CHOICES = [["yes", "no"], ["x"], [str(i) + "xy" * 500 for i in range(64)], ["\0", "\u00e4"]]
SCHEMAS = [
    {},
    {"type": "object"},
    {"type": "array", "items": {"type": "integer"}},
    {"type": ["string", "null"]},
    {"enum": [1, "a"]},
    {"type": "string", "pattern": "a{1000000}"},
    {"$ref": "#"},
    {"$ref": "http://x/y"},
    {"type": "nothing"},
    {"allOf": 3},
    {"type": "object", "properties": {"a": {"type": "string", "maxLength": 3}}, "required": ["a"]},
    {"minimum": 1e308},
    {"type": "string", "minLength": 5, "maxLength": 2},
    {"x-guidance": {"whitespace_pattern": "("}},
    {"const": {"a": [1]}},
    {"type": "integer", "multipleOf": 0},
    {"type": "object", "patternProperties": {"(": {}}},
    {"oneOf": [{}, {}]},
]
SPECIAL = {
    "guided_regex": PATTERNS,
    "regex": PATTERNS,
    "guided_grammar": GRAMMARS,
    "grammar": GRAMMARS,
    "guided_choice": CHOICES,
    "choice": CHOICES,
    "guided_json": SCHEMAS,
    "json": SCHEMAS,
    "schema": SCHEMAS,
    "role": ["user", "assistant", "system", "tool"],
    "arguments": ['{"a": 1}', "{", "[" * 500 + "]" * 500, '"', "", {"a": 1}, None, 3],
}
ODD_KEYS = ["", "x", "temprature", "n_predict", "messages", "\u00e4", "__class__", "model_config", "a.b", "x" * 300]


def deep(depth: int) -> Any:
    """Return lists within lists."""
    made: Any = 1
    for _ in range(depth):
        made = [made]
    return made


class BodyMaker:
    """Draws bodies.

    kind: the model of a body. seed: the same one draws the same bodies.
    """

    def __init__(self, kind: type[BaseModel], seed: int) -> None:
        self._schema, self._random = kind.model_json_schema(), random.Random(seed)

    def body(self, **fields: Any) -> dict[str, Any]:
        """Return a body. fields: those that it has in any case."""
        draw = self._random
        properties, made = self._schema["properties"], {}
        for name in draw.sample(sorted(properties), min(draw.choice([0, 1, 2, 3, 5, 99]), len(properties))):
            made[name] = self.value(name, properties[name])
        made |= {name: value for name, value in fields.items() if name not in made or draw.random() < 0.9}
        if draw.random() < 0.2:
            made[draw.choice(ODD_KEYS)] = self.anything()
        return made

    def value(self, name: str, schema: dict[str, Any], depth: int = 0) -> Any:
        """Return a value of a field: mostly one that its schema allows."""
        draw = self._random
        if draw.random() < 0.05:
            return self.anything()
        if name in SPECIAL and draw.random() < 0.9:
            return draw.choice(SPECIAL[name])
        if "$ref" in schema:
            schema = self._schema["$defs"][schema["$ref"].rpartition("/")[2]]
        if "anyOf" in schema:
            return self.value(name, draw.choice(schema["anyOf"]), depth)
        if "enum" in schema or "const" in schema:
            return draw.choice(schema.get("enum", [schema.get("const")]))
        return self._of_type(name, schema, depth)

    def _of_type(self, name: str, schema: dict[str, Any], depth: int) -> Any:
        draw, kind = self._random, schema.get("type")
        if kind == "array":
            return [self.value(name, schema.get("items", {}), depth + 1) for _ in range(draw.choice([0, 1, 1, 2, 3]))]
        if kind == "object" and "properties" in schema and depth < 6:
            required = schema.get("required", [])
            chosen = [one for one in schema["properties"] if one in required or draw.random() < 0.5]
            return {one: self.value(one, schema["properties"][one], depth + 1) for one in chosen}
        if kind == "object":
            return (
                self._call()
                if name == "tool_calls"
                else {draw.choice(ODD_KEYS): self.anything() for _ in range(draw.choice([0, 1, 2]))}
            )
        plain = {
            "string": TEXTS + WORDS,
            "integer": NUMBERS[:11],
            "number": NUMBERS,
            "boolean": [True, False],
            "null": [None],
        }
        return draw.choice(plain[kind]) if kind in plain else self.anything()

    def _call(self) -> dict[str, Any]:
        function = {"name": self._random.choice(["f", "", "x.y"]), "arguments": self.value("arguments", {})}
        return {"id": "call12345", "type": "function", "function": function}

    def anything(self) -> Any:
        """Return a value of any type."""
        draw = self._random
        plain = [
            None,
            True,
            False,
            [],
            {},
            draw.choice(TEXTS),
            draw.choice(NUMBERS),
            draw.choice(WORDS),
            [draw.choice(NUMBERS)],
        ]
        nested = [
            {draw.choice(ODD_KEYS): draw.choice(TEXTS)},
            [[]],
            [{}],
            [None],
            deep(draw.choice([3, 100, 190])),
            [draw.choice(SCHEMAS)],
        ]
        return draw.choice(plain + nested)
