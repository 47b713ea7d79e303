"""Make the page's picture for the documentation: python tests/support/page_screenshot.py docs/serve_page.png

A small model learns a few answers by heart first, so that the chat can be read. Other clients talk to it meanwhile.
"""

import itertools
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from support.browser import Browser  # noqa: E402
from support.http_server import serving  # noqa: E402
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers  # noqa: E402
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast  # noqa: E402

from kvpage import CacheConfig  # noqa: E402
from kvpage.server import ServerConfig, create_app  # noqa: E402
from kvpage.serving import AsyncEngine, Engine, EngineConfig  # noqa: E402
from kvpage.store import KVStore, KVStoreConfig, metadata_of  # noqa: E402
from kvpage.store.tiers.memory_tier import MemoryTier  # noqa: E402

TEMPLATE = (
    "{% for message in messages %}{{ message.role }}\n{{ message.content }}"
    "{{ '</s>' if message.role == 'assistant' else '\n' }}{% endfor %}"
    "{{ 'assistant\n' if add_generation_prompt else '' }}"
)
SYSTEM = "You are a librarian. Answer in one or two short sentences, and name the shelf where the book is found."
TALKS = [
    [
        ("", ""),
        ("Why does a chat get faster with a cache?",
         "Each turn repeats the whole conversation. Its keys and values are still in blocks, so only the new words are "
         "computed."),
        ("And if two people ask the same?",
         "Then both find the same blocks: a prefix is stored once, however many read it."),
    ],
    [(SYSTEM, ""), ("Where are the books on whales?", "Whales are on shelf twelve, between tides and windmills."),
     ("And on bees?", "Bees are on shelf four, beside the gardens.")],
    [(SYSTEM, ""), ("I look for old maps.", "Old maps are on shelf nine. Please turn the pages slowly."),
     ("Are there maps of the moon?", "One map of the moon is on shelf ten, under the stars.")],
    [(SYSTEM, ""), ("What do you have on trains?", "Trains are on shelf seven, and so are bridges and tunnels.")],
]  # fmt: skip


def messages_of(talk: list[tuple[str, str]]) -> list[dict[str, str]]:
    (system, _), *turns = talk
    messages = [{"role": "system", "content": system}] if system else []
    for question, reply in turns:
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": reply}]
    return messages


def make_tokenizer() -> PreTrainedTokenizerFast:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=512, special_tokens=["</s>"], initial_alphabet=alphabet)
    made.train_from_iterator([text for talk in TALKS for turn in talk for text in turn], trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="</s>", pad_token="</s>")
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def trained_model(tokenizer: Any, num_steps: int = 120) -> LlamaForCausalLM:
    """Return a model that has learnt the talks by heart."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=128, intermediate_size=384, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=1024, bos_token_id=None, eos_token_id=0, pad_token_id=0,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    rows = [tokenizer.apply_chat_template(messages_of(talk))["input_ids"] for talk in TALKS]
    most = max(map(len, rows))
    tokens = torch.tensor([row + [0] * (most - len(row)) for row in rows])
    labels = torch.tensor([row + [-100] * (most - len(row)) for row in rows])
    optimizer = torch.optim.AdamW(model.parameters(), 4e-3)
    for _ in range(num_steps):
        loss = model(tokens, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if loss < 0.01:
            break
    print(f"loss {loss:.4f}")
    return model.eval()


def talk_on(url: str, ends: threading.Event) -> None:
    """Ask the other questions again and again, with a word that is new each time."""
    for number, talk in enumerate(itertools.cycle(TALKS[1:])):
        if ends.is_set():
            return
        messages = messages_of(talk)[: 2 if number % 2 else -1]
        messages[-1]["content"] += f" Reader {number}." if number % 3 == 0 else ""
        body = {"messages": messages, "max_tokens": 48, "temperature": 0, "stop": "</s>"}
        httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60)


def chat(browser: Browser) -> None:
    """Ask what the first talk asks."""
    browser.value("settings.temperature = '0'; settings.maxTokens = '60'")
    for number, (question, _) in enumerate(TALKS[0][1:], 1):
        browser.value("document.querySelector('#prompt').focus()")
        browser.type(question)
        browser.press_enter()
        browser.wait_for(f"document.querySelectorAll('.facts').length === {number}")
        time.sleep(5)


def take(path: Path) -> None:
    tokenizer = make_tokenizer()
    cache = CacheConfig(block_size=8, num_gpu_blocks=34, num_cpu_blocks=48)
    config = EngineConfig(cache, load_or_compute=False, pin_quota=16)
    engine = Engine.from_model(trained_model(tokenizer), config, tokenizer=tokenizer)
    tier, step, ends = MemoryTier(1 << 22, pin_memory=False), engine.loop.try_step, threading.Event()
    engine.loop.try_step = lambda: time.sleep(0.012) or step()  # a larger model's pace
    with KVStore(KVStoreConfig(32), metadata_of(engine.cache, "m"), [tier]) as store, AsyncEngine(engine) as live:
        live.call(lambda engine: engine.use_store(store)).result()
        app = create_app(live, tokenizer, ServerConfig(["librarian-1m"]))
        with serving(app, live) as url, Browser(Path(tempfile.mkdtemp()), 60) as browser:
            others = [threading.Thread(target=talk_on, args=(url, ends), daemon=True) for _ in range(3)]
            browser.show(1360, 1240)
            browser.open(url)
            browser.wait_for("pictures.length > 0")
            for one in others:
                one.start()
            chat(browser)
            path.write_bytes(browser.picture())
            browser.show(1360, 1240, "dark")
            time.sleep(1.5)
            path.with_stem(f"{path.stem}_dark").write_bytes(browser.picture())
            ends.set()
            for one in others:
                one.join()
        app.state.service.close()


if __name__ == "__main__":
    take(Path(sys.argv[1]))
