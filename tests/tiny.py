"""Tiny random checkpoints, their tokenizer, and JSON lines, for tests that load or train a real model.

Each of the four families has what sets it apart: Llama is the plain one, Qwen3 normalises queries and
keys, GPT-2 has learned positions and dropout, Gemma scales its embeddings and ties its head.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

PAD, BOS, EOS, START, END = "<pad>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"
SPECIAL = (PAD, BOS, EOS, START, END)
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
FAMILIES = ("llama", "qwen3", "gpt2", "gemma")
POSITIONS = 128
CORPUS = (
    "the loss is not a number",
    "the gradient of the loss is finite",
    "user assistant system",
    "a number is a number",
)


@functools.lru_cache(maxsize=4)
def tokenizer(template: str | None = CHATML, *, adds: str = "") -> Any:
    """Byte-level BPE with a few dozen merges; `adds` names what it puts around a text: "bos", "bos eos" or nothing."""
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=list(SPECIAL), initial_alphabet=alphabet, show_progress=False
    )
    raw.train_from_iterator(CORPUS, trainer)
    if adds:
        from tokenizers.processors import TemplateProcessing

        single = " ".join({"bos": f"{BOS} $A", "eos": EOS}[part] for part in adds.split())
        ids = [(token, raw.token_to_id(token)) for token in (BOS, EOS)]
        raw.post_processor = TemplateProcessing(single=single, special_tokens=ids)
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=raw, pad_token=PAD, bos_token=BOS, eos_token=EOS, chat_template=template
    )


def config(family: str, **changes: Any) -> Any:
    """A family's configuration: hidden 32, two layers, four heads."""
    vocabulary = len(tokenizer())
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "vocab_size": vocabulary}
    if family == "gpt2":
        return transformers.GPT2Config(n_embd=32, n_layer=2, n_head=4, n_positions=POSITIONS, **{**ids, **changes})
    common = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": POSITIONS,
    }
    if family != "llama":
        common["head_dim"] = 8
    classes = {
        "llama": transformers.LlamaConfig,
        "qwen3": transformers.Qwen3Config,
        "gemma": transformers.GemmaConfig,
        "gemma2": transformers.Gemma2Config,
    }
    return classes[family](**{**common, **ids, **changes})


def checkpoint(folder: Path, family: str = "llama", *, tokens: Any = None, **changes: Any) -> Path:
    """Write a random checkpoint of a family with its tokenizer (`tokens=False`: without). Returns the folder."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config(family, **changes))
    model.save_pretrained(folder)
    if tokens is not False:
        (tokens or tokenizer()).save_pretrained(folder)
    return folder


def write_lines(path: Path, records: Iterable[Mapping[str, Any]]) -> Path:
    """Write JSON lines. Returns the path."""
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def chats(count: int) -> list[dict[str, Any]]:
    """Chats of several lengths, each with an id."""
    return [
        {
            "id": f"chat{index}",
            "messages": [
                {"role": "user", "content": "is the loss a number " + "and " * (index % 3)},
                {"role": "assistant", "content": "the loss is not a number " * (1 + index % 4)},
            ],
        }
        for index in range(count)
    ]
