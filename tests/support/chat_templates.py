# ruff: noqa: E501 - a template's line is read as one
"""Chat templates in the idioms of 32 model families, written here: how each takes content, calls, results and thoughts.

SYSTEM, TOOLS: the families whose template takes system messages, and calls of tools.
"""

GEN = "{% if add_generation_prompt %}"
NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
TURNS = "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must take turns') }}{% endif %}"
AFTER_SYSTEM = (
    "{% if messages[0].role == 'system' %}{% set sys = messages[0].content %}{% set rest = messages[1:] %}"
    "{% else %}{% set sys = '' %}{% set rest = messages %}{% endif %}"
)
HERMES_CALLS = (
    '{% for c in m.tool_calls %}<tool_call>\n{"name": "{{ c.function.name }}", "arguments": '
    "{{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}"
)
PARTS = "{% for p in m.content %}{% if p.type == 'image' %}<image>{% elif p.type == 'text' %}{{ p.text }}{% endif %}{% endfor %}"
EITHER = "{% if m.content is string %}{{ m.content | trim }}{% else %}" + PARTS + "{% endif %}"
THOUGHT = (
    "{% if m.reasoning_content is string %}{% set thought = m.reasoning_content %}"
    "{% elif '</think>' in m.content %}{% set thought = m.content.split('</think>')[0].split('<think>')[-1] %}{% endif %}"
)


def _each(body: str, messages: str = "messages") -> str:
    return "{% for m in " + messages + " %}" + body + "{% endfor %}"


def _chatml(middle: str) -> str:
    return _each("<|im_start|>{{ m.role }}\n" + middle + "<|im_end|>\n") + GEN + "<|im_start|>assistant\n{% endif %}"


TEMPLATES = {
    "llama 2": AFTER_SYSTEM + _each(TURNS + (
        "{% if loop.first and sys %}{% set text = '<<SYS>>\n' + sys + '\n<</SYS>>\n\n' + m.content %}"
        "{% else %}{% set text = m.content %}{% endif %}"
        "{% if m.role == 'user' %}{{ bos_token + '[INST] ' + text.strip() + ' [/INST]' }}"
        "{% else %}{{ ' ' + text.strip() + ' ' + eos_token }}{% endif %}"), "rest"),
    "llama 3": _each("{{ '<|head|>' + m['role'] + '<|/head|>\n\n' + m['content'] | trim + '<|eot|>' }}"),
    "llama 3.1": _each(
        "{% if m.tool_calls %}{% if m.tool_calls | length != 1 %}{{ raise_exception('one call at once') }}{% endif %}"
        "{% set f = m.tool_calls[0].function %}<|head|>assistant<|/head|>"
        "{{ '{\"name\": \"' + f.name + '\", \"parameters\": ' }}{{ f.arguments | tojson }}{{ '}' }}<|eot|>"
        "{% elif m.role in ['tool', 'ipython'] %}<|head|>ipython<|/head|>"
        "{% if m.content is mapping or m.content is iterable and m.content is not string %}{{ m.content | tojson }}"
        "{% else %}{{ m.content }}{% endif %}<|eot|>"
        "{% else %}<|head|>{{ m.role }}<|/head|>{{ m.content | trim }}<|eot|>{% endif %}"),
    "mistral 1": AFTER_SYSTEM + _each(TURNS + (
        "{% if m.role == 'user' %}[INST] {% if loop.first and sys %}{{ sys }}\n\n{% endif %}{{ m.content }}[/INST]"
        "{% else %}{{ m.content }}{{ eos_token }}{% endif %}"), "rest"),
    "mistral 3": AFTER_SYSTEM + _each(
        "{% if m.role == 'user' %}[INST] {% if loop.last and sys %}{{ sys }}\n\n{% endif %}{{ m.content }}[/INST]"
        "{% elif m.tool_calls is defined and m.tool_calls is not none %}[TOOL_CALLS] [{% for c in m.tool_calls %}"
        "{{ c.function | tojson }}{% if c.id is not defined or c.id | length != 9 %}"
        "{{ raise_exception('ids must have nine characters') }}{% endif %}{% endfor %}]{{ eos_token }}"
        "{% elif m.role == 'assistant' %}{{ ' ' + m.content | trim + eos_token }}"
        "{% elif m.role == 'tool' %}[TOOL_RESULTS]{{ m.content | string }}[/TOOL_RESULTS]{% endif %}", "rest")
        + "{% if sys and rest[-1].role != 'user' %}{{ sys }}{% endif %}",
    "mistral small": _each(
        "{% if m.role == 'system' %}[SYS]{% if m.content is string %}{{ m.content }}{% else %}{{ m.content[0].text }}"
        "{% endif %}[/SYS]{% elif m.role == 'tool' %}[RESULTS]{{ m.content }}[/RESULTS]"
        "{% elif m.role == 'user' %}[INST]" + EITHER + "[/INST]"
        "{% else %}{% if m.content %}{{ m.content }}{% endif %}{% for c in m.tool_calls or [] %}[CALL]{{ c.function.name }}[ARGS]"
        "{% if c.function.arguments is string %}{{ c.function.arguments }}{% else %}{{ c.function.arguments | tojson }}"
        "{% endif %}{% endfor %}{{ eos_token }}{% endif %}"),
    "qwen 1.5": _chatml("{{ m.content }}"),
    "qwen 2.5": _each(
        "{% if m.role == 'user' or (m.role == 'system' and not loop.first) or (m.role == 'assistant' and not m.tool_calls) %}"
        "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
        "{% elif m.role == 'system' %}<|im_start|>system\n{{ m.content }}<|im_end|>\n"
        "{% elif m.role == 'assistant' %}<|im_start|>assistant{% if m.content %}{{ '\n' + m.content }}{% endif %}"
        + HERMES_CALLS + "<|im_end|>\n"
        "{% elif m.role == 'tool' %}<|im_start|>user\n<tool_response>{{ m.content }}</tool_response><|im_end|>\n{% endif %}"),
    "qwen 3": "{% set ns = namespace(last=0) %}" + _each("{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}")
        + _each(
        "{% if m.role == 'assistant' %}" + THOUGHT + "<|im_start|>assistant\n"
        "{% if loop.index0 > ns.last and thought %}<think>\n{{ thought.strip() }}\n</think>\n\n{% endif %}"
        "{{ m.content.split('</think>')[-1].lstrip('\n') }}{% if m.tool_calls %}" + HERMES_CALLS + "{% endif %}<|im_end|>\n"
        "{% elif m.role == 'tool' %}<|im_start|>user\n<tool_response>\n{{ m.content }}\n</tool_response><|im_end|>\n"
        "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}")
        + GEN + "<|im_start|>assistant\n{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n"
        "{% endif %}{% endif %}",
    "qwen 3 coder": _each(
        "{% if m.role == 'assistant' and m.tool_calls is defined and m.tool_calls is iterable and m.tool_calls | length > 0 %}"
        "<|im_start|>assistant{% if m.content is defined and m.content is string and m.content | trim | length > 0 %}"
        "{{ '\n' + m.content | trim + '\n' }}{% endif %}{% for c in m.tool_calls %}<tool_call>\n<function={{ c.function.name }}>\n"
        "{% for name, value in c.function.arguments | items %}<parameter={{ name }}>\n{{ value }}\n</parameter>\n{% endfor %}"
        "</function>\n</tool_call>{% endfor %}<|im_end|>\n"
        "{% elif m.role == 'tool' %}<tool_response>{{ m.content }}</tool_response>"
        "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}"),
    "qwen vl": _chatml(EITHER),
    "deepseek 2": _each(
        "{% if m.role == 'user' %}User: {{ m.content }}\n\n{% elif m.role == 'assistant' %}Assistant: {{ m.content }}{{ eos_token }}"
        "{% elif m.role == 'system' %}{{ m.content }}\n\n{% endif %}"),
    "deepseek 3": "{% set ns = namespace(system='') %}" + _each("{% if m['role'] == 'system' %}{% set ns.system = ns.system + m['content'] %}{% endif %}")
        + "{{ bos_token }}{{ ns.system }}" + _each(
        "{% if m['role'] == 'user' %}{{ '<|User|>' + m['content'] }}{% endif %}"
        "{% if m['role'] == 'assistant' and m['content'] is none %}<|calls|>{% for c in m['tool_calls'] %}"
        "{{ '<|call|>' + c['type'] + '<|sep|>' + c['function']['name'] + '\n```json\n' + c['function']['arguments'] + '\n```' }}"
        "{% endfor %}<|/calls|>{% endif %}"
        "{% if m['role'] == 'assistant' and m['content'] is not none %}{{ '<|Assistant|>' + m['content'] + eos_token }}{% endif %}"
        "{% if m['role'] == 'tool' %}{{ '<|output|>' + m['content'] + '<|/output|>' }}{% endif %}"),
    "deepseek r1": _each(
        "{% if m['role'] == 'system' or m['role'] == 'user' %}{{ '<|' + m['role'] + '|>' + m['content'] }}{% endif %}"
        "{% if m['role'] == 'assistant' and m['content'] is none %}{% for c in m['tool_calls'] %}"
        "{{ c['function']['name'] + '<|sep|>' + c['function']['arguments'] }}{% endfor %}{% endif %}"
        "{% if m['role'] == 'assistant' and m['content'] is not none %}{% set text = m['content'] %}"
        "{% if '</think>' in text %}{% set text = text.split('</think>')[-1] %}{% endif %}{{ '<|Assistant|>' + text }}{% endif %}"
        "{% if m['role'] == 'tool' %}{{ '<|output|>' + m['content'] }}{% endif %}"),
    "deepseek 3.1": _each(
        "{% if m['role'] in ['system', 'user'] %}<|{{ m['role'] }}|>{{ m['content'] }}{% endif %}"
        "{% if m['role'] == 'assistant' and m['tool_calls'] is defined and m['tool_calls'] is not none %}<|Assistant|></think>"
        "{% for c in m['tool_calls'] %}{% if m['content'] is none %}{{ '<|calls|>' + c['function']['name'] + '<|sep|>' + c['function']['arguments'] }}"
        "{% else %}{{ m['content'] + '<|calls|>' + c['function']['name'] + '<|sep|>' + c['function']['arguments'] }}{% endif %}{% endfor %}"
        "{% elif m['role'] == 'assistant' %}<|Assistant|>{% if m['prefix'] is defined and m['prefix'] and thinking %}<think>{% else %}</think>{% endif %}"
        "{{ m['content'] }}{% endif %}{% if m['role'] == 'tool' %}{{ '<|output|>' + m['content'] }}{% endif %}")
        + "{% if add_generation_prompt %}<|Assistant|>{% if thinking %}<think>{% else %}</think>{% endif %}{% endif %}",
    "gemma 2": NO_SYSTEM + _each(
        TURNS + "<start_of_turn>{% if m.role == 'assistant' %}model{% else %}{{ m.role }}{% endif %}\n{{ m.content | trim }}<end_of_turn>\n"),
    "gemma 3": AFTER_SYSTEM + "{% if sys is not string %}{% set sys = sys[0].text %}{% endif %}" + _each(
        TURNS + "<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n{% if loop.first %}{{ sys }}{% endif %}" + EITHER
        + "<end_of_turn>\n", "rest"),
    "phi 3": _each("{% if m.role == 'system' %}<|system|>\n{{ m.content }}<|end|>\n{% elif m.role == 'user' %}<|user|>\n{{ m.content }}<|end|>\n"
                   "{% elif m.role == 'assistant' %}<|assistant|>\n{{ m.content }}<|end|>\n{% endif %}"),
    "phi 4": _each("{% if m.role == 'system' and tools is defined and tools is not none %}<|system|>{{ m.content }}<|tool|>{{ tools | tojson }}<|/tool|>"
                   "{% else %}<|{{ m.role }}|>{{ m.content }}{% endif %}<|end|>"),
    "command r": AFTER_SYSTEM + "{% if sys %}<|SYS|>{{ sys }}{% endif %}" + _each(
        "{% set text = m.content %}{% if m.role == 'user' %}{{ '<|USER|>' + text.strip() }}"
        "{% elif m.role == 'assistant' %}{{ '<|BOT|>' + text.strip() }}{% endif %}", "rest"),
    "granite": _each("{% if m.role == 'assistant' and m.tool_calls %}<|role|>assistant<|/role|>" + HERMES_CALLS
                     + "{{ m.content or '' }}{% else %}<|role|>{{ m.role }}<|/role|>{{ m.content }}{% endif %}<|eos|>\n"),
    "falcon": _each("{% if not loop.first %}\n{% endif %}{% if m.role == 'system' %}{{ m.content }}{% elif m.role == 'user' %}"
                    "User: {{ m.content.strip() | replace('\r\n', '\n') }}{% elif m.role == 'assistant' %}Falcon: {{ m.content }}{% endif %}"),
    "zephyr": _each("{% if m['role'] in ['user', 'system', 'assistant'] %}<|{{ m['role'] }}|>\n{{ m['content'] + eos_token }}\n{% endif %}"),
    "vicuna": AFTER_SYSTEM + "{{ sys }}" + _each("{% if m.role == 'user' %} USER: {{ m.content.strip() }}{% else %} ASSISTANT: {{ m.content.strip() }}</s>{% endif %}", "rest"),
    "alpaca": _each("{% if m.role == 'system' %}{{ m.content }}\n\n{% elif m.role == 'user' %}### Instruction:\n{{ m.content }}\n\n"
                    "{% else %}### Response:\n{{ m.content }}\n\n{% endif %}"),
    "glm 4": _each(
        "<|{{ 'observation' if m.role == 'tool' else m.role }}|>{% if m.role == 'tool' %}<tool_response>{% if m.content is string %}{{ m.content }}"
        "{% else %}{% for r in m.content %}{{ r.output if r.output is defined else r }}{% endfor %}{% endif %}</tool_response>"
        "{% else %}\n{% macro visible(c) %}{% if c is string %}{{ c }}{% elif c is iterable and c is not mapping %}{% for i in c %}"
        "{% if i is mapping and i.type == 'text' %}{{ i.text }}{% elif i is string %}{{ i }}{% endif %}{% endfor %}{% endif %}{% endmacro %}"
        "{{ visible(m.content).split('</think>')[-1] }}{% endif %}"
        "{% if m.tool_calls %}{% for c in m.tool_calls %}{% set f = c.function %}<tool_call>{{ f.name }}\n{% for k, v in f.arguments.items() %}"
        "<arg_key>{{ k }}</arg_key>\n<arg_value>{{ v | tojson if v is not string else v }}</arg_value>{% endfor %}</tool_call>{% endfor %}{% endif %}"),
    "kimi": _each(
        "<|im_{{ m.role }}|>{{ m.name or m.role }}<|im_middle|>{% if m.role == 'assistant' and m.tool_calls %}"
        "{% if m.content is string %}{{ m.content }}{% elif m.content %}" + PARTS + "{% endif %}{% for c in m.tool_calls %}<|call|>{{ c.id }} {{ c.function.name }}"
        "{% if c.function.arguments is string %}{{ c.function.arguments }}{% else %}{{ c.function.arguments | tojson }}{% endif %}{% endfor %}"
        "{% elif m.role == 'tool' %}## Return of {{ m.tool_call_id }}\n{{ m.content }}{% elif m.content is string %}{{ m.content }}{% else %}" + PARTS + "{% endif %}<|im_end|>"),
    "gpt oss": "{% set ns = namespace(call=none) %}" + _each(
        "{% if m.role in ['developer', 'system'] %}<|start|>developer<|message|># Instructions\n\n{{ m.content }}<|end|>"
        "{% elif m.role == 'assistant' and m.tool_calls %}{% if m.content %}<|start|>assistant<|channel|>analysis<|message|>{{ m.content }}<|end|>{% endif %}"
        "{% set f = m.tool_calls[0].function %}{% set ns.call = f.name %}<|start|>assistant to=functions.{{ f.name }}<|message|>{{ f.arguments | tojson }}<|call|>"
        "{% elif m.role == 'tool' %}{% if ns.call is none %}{{ raise_exception('a result without a call') }}{% endif %}"
        "<|start|>functions.{{ ns.call }} to=assistant<|message|>{{ m.content | tojson }}<|end|>"
        "{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}")
        + "{% if reasoning_effort %}Reasoning: {{ reasoning_effort }}{% endif %}",
    "llava": _each("<|{{ m['role'] }}|>{% for p in m['content'] | selectattr('type', 'equalto', 'image') %}<image>{% endfor %}"
                   "{% for p in m['content'] | selectattr('type', 'equalto', 'text') %}{{ p['text'] }}{% endfor %}\n"),
    "smolvlm": _each("{{ m.role | capitalize }}{% if m.content[0].type == 'image' %}:{% else %}: {% endif %}{% for line in m.content %}"
                     "{% if line['type'] == 'text' %}{{ line['text'] }}{% elif line['type'] == 'image' %}<image>{% endif %}{% endfor %}<end_of_utterance>\n"),
    "internvl": _each("<|im_start|>{{ m.role }}\n{% if m.role == 'system' %}{{ m.content }}{% else %}" + PARTS + "{% endif %}<|im_end|>\n"),
    "lfm 2": _each("<|im_start|>{{ m.role }}\n{% if m.content is not string %}{{ m.content | tojson }}{% else %}{{ m.content }}{% endif %}<|im_end|>\n"),
}  # fmt: skip
SYSTEM = frozenset(TEMPLATES) - {"gemma 2"}
TOOLS = frozenset({
    "llama 3.1", "mistral 3", "mistral small", "qwen 2.5", "qwen 3", "qwen 3 coder", "deepseek 3", "deepseek r1", "deepseek 3.1",
    "granite", "glm 4", "kimi", "gpt oss",
})  # fmt: skip
