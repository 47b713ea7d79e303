# ruff: noqa: E501 - a body is read as one
"""Bodies as coding agents send them: a long system prompt, 20 tools, parts, nulls, and fields that change nothing."""

from typing import Any

SYSTEM = "You are a coding agent. Be careful with files, and tell the user about each change.\n" * 12
EPHEMERAL = {"type": "ephemeral"}


def _object(required: list[str], **properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


PATH = {"type": "string", "description": "An absolute path", "format": "path", "minLength": 1}
SCHEMAS: dict[str, Any] = {
    "read_file": _object(["file_path"], file_path=PATH, offset={"type": "number", "minimum": 0}, limit={"type": "integer"}),
    "write_file": {"$schema": "https://json-schema.org/draft/2020-12/schema", **_object(["file_path", "content"], file_path=PATH, content={"type": "string"})},
    "edit_file": _object(["file_path", "old", "new"], file_path=PATH, old={"type": "string"}, new={"type": "string"}, all={"type": "boolean", "default": False}),
    "multi_edit": _object(["edits"], edits={"type": "array", "minItems": 1, "items": _object(["old", "new"], old={"type": "string"}, new={"type": "string"})}),
    "shell": _object(["command"], command={"type": "array", "items": {"type": "string"}}, timeout_ms={"type": ["number", "null"]}, workdir={"type": "string"}),
    "grep": _object(["pattern"], pattern={"type": "string"}, mode={"type": "string", "enum": ["content", "files", "count"]}, **{"-i": {"type": "boolean"}, "-A": {"type": "number"}}),
    "glob": _object(["pattern"], pattern={"type": "string"}, path={"anyOf": [{"type": "string"}, {"type": "null"}], "default": None}),
    "list_dir": {"type": "object", "properties": {"path": PATH, "ignore": {"type": "array", "items": {"type": "string"}}}},
    "todo_write": _object(["todos"], todos={"type": "array", "items": {"$ref": "#/$defs/todo"}}) | {
        "$defs": {"todo": _object(["content", "status"], content={"type": "string", "minLength": 1}, status={"enum": ["pending", "done"]})}},
    "web_fetch": _object(["url"], url={"type": "string", "format": "uri"}, prompt={"type": "string"}),
    "task": _object(["prompt", "kind"], prompt={"type": "string"}, kind={"type": "string"}),
    "exit_plan": {"type": "object", "properties": {}},
    "bash_output": _object(["bash_id"], bash_id={"type": "string"}, filter={"type": "string", "nullable": True}),
    "kill_shell": _object(["shell_id"], shell_id={"type": "string"}),
    "notebook_edit": _object(["cell"], cell={"oneOf": [{"type": "integer"}, {"type": "string"}]}, kind={"const": "code"}),
    "ask_user": _object(["questions"], questions={"type": "array", "maxItems": 4, "items": {"type": "object", "additionalProperties": {"type": "string"}}}),
    "mcp__git__log": {"type": "object", "title": "Log", "properties": {"max_count": {"type": "integer", "default": 10, "title": "Max"}}, "examples": [{}]},
    "mcp__db__query": _object(["sql"], sql={"type": "string", "x-order": 1}, params={"type": "object", "additionalProperties": True}),
    "nothing": None,
    "anything": {},
}  # fmt: skip
RESULT = "the file has 3 lines\n"
CHAT_BODY: dict[str, Any] = {
    "model": "tiny",
    "messages": [
        {"role": "system", "content": [{"type": "text", "text": SYSTEM, "cache_control": EPHEMERAL}]},
        {"role": "user", "content": [{"type": "text", "text": "mend the test"}, {"type": "text", "text": "<env>linux</env>", "cache_control": EPHEMERAL}]},
        {"role": "assistant", "content": None, "refusal": None, "audio": None, "annotations": [], "function_call": None, "reasoning_content": "hm",
         "tool_calls": [{"index": 0, "id": "call_a", "type": "function", "function": {"name": "read_file", "arguments": '{"file_path": "/a"}'}},
                        {"index": 1, "id": "call_b", "type": "function", "function": {"name": "shell", "arguments": '{"command": ["ls", '}}]},
        {"role": "tool", "tool_call_id": "call_a", "name": "read_file", "content": [{"type": "text", "text": RESULT}]},
        {"role": "tool", "tool_call_id": "call_b", "content": "Error: the arguments are no JSON"},
    ],
    "tools": [{"type": "function", "function": {"name": name, "description": "It does it. " * 20, **({} if schema is None else {"parameters": schema}),
                                                "strict": False if schema else None}} for name, schema in SCHEMAS.items()],
    "tool_choice": "auto", "parallel_tool_calls": True, "stream_options": {"include_usage": True}, "max_tokens": 8, "max_completion_tokens": None,
    "temperature": 0, "top_p": None, "n": None, "stop": None, "seed": None, "user": "u", "metadata": {"session": "s"}, "store": False, "logprobs": None,
    "reasoning_effort": "medium", "verbosity": "low", "service_tier": "auto", "prompt_cache_key": "k", "response_format": None, "prediction": None,
    "modalities": None, "web_search_options": None, "extra_headers": {"x": "y"}, "frobnicate": True, "safety_identifier": "s",
}  # fmt: skip
RESPONSES_BODY: dict[str, Any] = {
    "model": "tiny", "instructions": SYSTEM, "previous_response_id": None, "store": False, "include": ["reasoning.encrypted_content"],
    "input": [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "<permissions>"}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "mend the test"}], "id": None, "status": None},
        {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "hm"}], "content": None, "encrypted_content": "x"},
        {"type": "function_call", "id": "fc_1", "call_id": "call_a", "name": "read_file", "arguments": "{}", "status": "completed"},
        {"type": "function_call", "call_id": "call_b", "name": "shell", "arguments": '{"command": ['},
        {"type": "function_call_output", "call_id": "call_a", "output": [{"type": "input_text", "text": RESULT}]},
        {"type": "function_call_output", "call_id": "call_b", "output": "no JSON"},
    ],
    "tools": [{"type": "function", "name": name, "description": "It does it.", "parameters": schema, "strict": False} for name, schema in SCHEMAS.items()],
    "tool_choice": "auto", "parallel_tool_calls": False, "max_output_tokens": 8, "reasoning": {"effort": "medium", "summary": "auto"},
    "text": {"verbosity": "low"}, "prompt_cache_key": "k", "client_metadata": {"a": "b"}, "service_tier": None, "temperature": None, "truncation": None,
}  # fmt: skip
MESSAGES_BODY: dict[str, Any] = {
    "model": "tiny", "max_tokens": 8, "system": [{"type": "text", "text": SYSTEM, "cache_control": EPHEMERAL}],
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "<system-reminder>"}, {"type": "text", "text": "mend the test", "cache_control": EPHEMERAL}]},
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm", "signature": "x"}, {"type": "text", "text": "I look."},
                                          {"type": "tool_use", "id": "toolu_a", "name": "read_file", "input": {"file_path": "/a"}, "caller": {"type": "direct"}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "toolu_a", "content": RESULT, "is_error": False, "cache_control": EPHEMERAL}]},
    ],
    "tools": [{"name": name, "description": "It does it.", "input_schema": schema or {"type": "object"}, "cache_control": EPHEMERAL} for name, schema in SCHEMAS.items()],
    "metadata": {"user_id": "u"}, "thinking": {"type": "enabled", "budget_tokens": 1024}, "temperature": 1, "context_management": {"edits": []},
    "tool_choice": {"type": "auto"}, "stop_sequences": None, "betas": ["x"],
}  # fmt: skip
