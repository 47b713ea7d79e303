"""FamilyTable: docs/families.md, written from the findings, and read again."""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from support.family import EQUAL, Family

HEAD = """# Which decoders are served

The table has every decoder type of transformers {version}, tried with tiny random models: {total} types.
`Engine` serves {engine}. `KVPageCache` serves {cache}, {only_cache} of which `Engine` refuses.
Both refuse {neither} when they are made. They raise a ValueError, whose reason is shortened here, or the model itself \
raises.{untried}

- "{equal}": greedy tokens are those of `model.generate`. Two prompts share their beginning, and are computed in parts
  of {chunk} tokens. Then both come again from the cache. Sliding windows are shorter than the prompts.
- "attention past AttentionInterface": the model computes attention by itself. `Engine` cannot hand it blocks, while
  `KVPageCache` gives it K and V as tensors.
- "layers of ...": the layers keep more than K and V of each token, or attend over chunks or an index.
- "sliding window in transformers' cache alone": its mask shows all tokens. Blocks keep what that cache forgets.

`KVPageCache` takes models that hand latents to their cache with `CacheConfig(backend="mla")`, as they are tried here.
Encoders that can be decoders, such as BERT, are tried with `is_decoder=True`.

The tiny models are scaled down: sizes of K's and V's heads keep the proportions of the type's default config. Some
types are tried in several released shapes. The row tells the shape that is served worst:

- Gemma 4 as E2B and E4B: layers that share K and V, heads of 256 and 512.
- Gemma 4 as 31B and 26B-A4B: 16 or 8 KV heads of 256 beside 4 or 2 of 512. K and V are one projection.
- MiMo-V2-Flash: 4 and 8 KV heads of 192, whose V has 128.

Other models may differ, so both classes look at the model that they are given. These commands make and check the table:

    python tests/support/families.py --write docs/families.md
    python tests/support/families.py --check docs/families.md

| type | class | `Engine` | `KVPageCache` |
|---|---|---|---|
"""
UNTRIED = " {} could not be tried."
SHORTER = [
    (r"^layers must be of .*?, \w+ has (.*)", r"layers of \1"),
    (r"^attention must go through transformers' AttentionInterface.*", "attention past AttentionInterface"),
    (r"^forward must take (\w+)[\w ]*,.*", r"forward takes no \1"),
    (r"^a sliding window must reach .*", "sliding window past the attention function"),
    (r"^a sliding window must be in the model's mask.*", "sliding window in transformers' cache alone"),
    (r"^\w+ of layer \d+ must be causal.*", "attention is not causal"),
    (r"^logits over blocks .*", "other logits over blocks"),
    (r"^layers \[.*?\] must each attend once.*it was \[\].*", "attention past AttentionInterface"),
    (r"^layers \[.*?\] must each attend once.*", "layers attend more than once"),
    (r"^K and V of all layers must have one shape.*", "K and V of another shape"),
    (r"^not tried: ImportError: \w+ requires the (\w+) library.*", r"not tried: it needs \1"),
    (r"^not tried: The set of layer types producing.*", "not tried: transformers' own check refuses its config"),
    (r"^inputs_embeds and shared_kv_states cannot be None.*", "needs another model's K and V"),
    (r"^config must have num_hidden_layers.*", "no layers in its config"),
    (r"^(\w+(Error|Exception)): .*", r"the model raises \1"),
    (r"^states must be in layers of transformers' cache.*", "states outside of its cache"),
    (r"^model must take several tokens after those in its cache.*", "takes one token after the other"),
    (r"^model must write its K and V into its cache.*", "K and V past the cache"),
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class FamilyTable:
    """version: of transformers. rows: (class, Engine, KVPageCache) by type."""

    version: str
    rows: dict[str, tuple[str, str, str]]

    @classmethod
    def of_families(cls, version: str, families: Iterable[Family]) -> "FamilyTable":
        return cls(version, {family.kind: row_of(family) for family in sorted(families, key=lambda one: one.kind)})

    @classmethod
    def parse(cls, text: str) -> "FamilyTable":
        """Return the table that `text` holds. ValueError if there is no version in it."""
        version = re.search(r"decoder type of transformers (\S+),", text)
        if version is None:
            raise ValueError("the text must name the version of transformers")
        rows = re.findall(r"^\| `(.+?)` \| (.*?) \| (.*?) \| (.*?) \|$", text, re.MULTILINE)
        return cls(version[1], {kind: (name, engine, cache) for kind, name, engine, cache in rows})

    def text(self, chunk: int) -> str:
        """The document."""
        verdicts = [(engine == EQUAL, cache == EQUAL) for _, engine, cache in self.rows.values()]
        num_untried = sum(engine.startswith("not tried") for _, engine, _ in self.rows.values())
        head = HEAD.format(
            version=self.version,
            total=len(verdicts),
            engine=sum(engine for engine, _ in verdicts),
            cache=sum(cache for _, cache in verdicts),
            only_cache=verdicts.count((False, True)),
            neither=verdicts.count((False, False)) - num_untried,
            untried=UNTRIED.format(num_untried) if num_untried else "",
            equal=EQUAL,
            chunk=chunk,
        )
        return head + "".join(f"| `{kind}` | {' | '.join(row)} |\n" for kind, row in self.rows.items())


def row_of(family: Family) -> tuple[str, str, str]:
    if family.trouble:
        return family.name, shortened(family.trouble), shortened(family.trouble)
    return family.name, shortened(family.engine), shortened(family.cache)


def shortened(reason: str) -> str:
    """A refusal in a few words, without the parts that differ from machine to machine."""
    reason = reason.split(". KVPageCache serves")[0]
    for pattern, words in SHORTER:
        if re.match(pattern, reason):
            return re.sub(pattern, words, reason)
    return reason.replace("|", "/")[:100]
