"""A folder with a random model that calls tools in the format of Hermes, as both servers load it."""

from pathlib import Path

from tokenizers import AddedToken

from kvpage.benchmarks.serve_model import make_tokenizer, save_model
from kvpage.benchmarks.serving_workloads import VOCAB, Shape

END = "<|end|>"
TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>"
    "{% if loop.first and tools %}<tools>{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}</tools>\n{% endif %}"
    "{{ message.content or '' }}"
    "{% for call in message.tool_calls or [] %}"
    '\n<tool_call>\n{"name": "{{ call.function.name }}", '
    '"arguments": {{ call.function.arguments | tojson }}}\n</tool_call>'
    "{% endfor %}" + END + "\n{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


def save_agent_model(folder: Path, shape: Shape, dtype: str, max_model_len: int) -> None:
    """Write a random Llama, a tokenizer of its vocabulary whose last id ends an answer, and a template with tools."""
    end_id = VOCAB - 1
    save_model(folder, shape, dtype, max_position_embeddings=max_model_len, eos_token_id=end_id)
    tokenizer = make_tokenizer(VOCAB - 1)
    tokenizer.add_special_tokens({"eos_token": AddedToken(END, special=True)})
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
