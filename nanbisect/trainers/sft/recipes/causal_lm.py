"""Recipe `causal-lm`: any AutoModelForCausalLM on JSON lines of chat, prompt/completion, text or tokens.

A record is one of
    {"messages": [{"role": ..., "content": ...}, ...]}     labels on the assistant's turns only
    {"prompt": "...", "completion": "..."}                 labels on the completion and the end
    {"text": "..."}                                        labels on everything and the end
    {"input_ids": [...], "labels": [...]}                  as they are; -100 is ignored
with an optional `id` (else its line number). There is one channel, `text`. Turns and completions are
tokenised together with what precedes them, as in training scripts; a token that straddles the
boundary carries a label. Tokenising waits for `collate`, so that a record nobody chose can't fail.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch.nn import functional

from nanbisect.trainers.sft import held
from nanbisect.trainers.sft.problems import BadInput, Unsupported, first_line, out_of_memory
from nanbisect.trainers.sft.recipes import hub, jsonl
from nanbisect.trainers.sft.view import Settings

IGNORED = -100
IMPLEMENTATIONS = {"eager": "eager", "sdpa": "sdpa", "flash": "flash_attention_2"}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
NO_ATTENTION = re.compile(r"attn_implementation|flash.?att|does not support .*attention implementation", re.IGNORECASE)
ADAPTS = ("attention", "attention_kernel")
"""Settings that `adapt` can change on a loaded model; the loop forces the kernel."""
Record = Mapping[str, Any]


@dataclass(frozen=True)
class Tokens:
    """A record's tokens and labels, of the same length."""

    ids: list[int]
    labels: list[int]

    def cut(self, limit: int | None) -> Tokens:
        """The first `limit` tokens."""
        return Tokens(self.ids[:limit], self.labels[:limit])

    def closed(self, end: int | None) -> Tokens:
        """With exactly one end token, labelled (some tokenizers add it themselves)."""
        if end is None:
            return self
        there = self.ids[-1:] == [end]
        before = self.cut(-1) if there else self
        return Tokens([*before.ids, end], [*before.labels, end])


def model(settings: Settings) -> torch.nn.Module:
    """The pretrained model with the wanted attention and parameter dtype."""
    attention, kernel, name = settings.attention, settings.attention_kernel, _model_name(settings)
    implementation, dtype, trust = IMPLEMENTATIONS[attention], settings.param_dtype, settings.trust_remote_code
    with _explained(name, f"{attention}:{kernel}" if kernel else attention):
        loaded: torch.nn.Module | None = None if trust else held.take(name, implementation, dtype)
        if loaded is None:
            loaded = pretrained(name, implementation, dtype, **hub.options(name, trust=trust))
    return loaded


@contextlib.contextmanager
def _explained(name: str, level: str) -> Iterator[None]:
    """What transformers, safetensors and remote code raise, which may be anything, in the user's words."""
    try:
        yield
    except Exception as error:
        if out_of_memory(error):
            raise
        if isinstance(error, (ImportError, ValueError)) and NO_ATTENTION.search(str(error)):
            raise Unsupported(first_line(error), {"attention": level}) from error
        raise BadInput(hub.not_found(name, error)) from error


def adapt(model: Any, settings: Settings) -> bool:
    """Give a loaded model this attention; whether it has it now. Classes must stay what they are."""
    attention, kernel, name = settings.attention, settings.attention_kernel, _model_name(settings)
    implementation = IMPLEMENTATIONS[attention]
    if getattr(model.config, "_attn_implementation", None) == implementation:
        return True
    if not hasattr(model, "set_attn_implementation"):
        return False
    classes = [type(module) for module in model.modules()]
    with _explained(name, f"{attention}:{kernel}" if kernel else attention):
        model.set_attn_implementation(implementation)
    same = classes == [type(module) for module in model.modules()]
    return same and bool(model.config._attn_implementation == implementation)


def pretrained(name: str, implementation: str, param_dtype: str, **options: Any) -> Any:
    """What transformers loads."""
    dtype = "dtype" if _version() >= (4, 56) else "torch_dtype"
    wanted = {"attn_implementation": implementation, dtype: DTYPES[param_dtype]}
    return transformers.AutoModelForCausalLM.from_pretrained(name, **wanted, **options)


def parameter_count(settings: Settings) -> int:
    """Parameters of the model, from its configuration alone; nothing is loaded."""
    name = _model_name(settings)
    config = _config(name, settings.trust_remote_code)
    try:
        with torch.device("meta"):
            empty = transformers.AutoModelForCausalLM.from_config(config, trust_remote_code=settings.trust_remote_code)
    except Exception as error:  # a class that is no causal language model, a config with a value it can't use
        raise BadInput(hub.not_found(name, error)) from error
    return sum(parameter.numel() for parameter in empty.parameters())


def records(settings: Settings) -> Iterator[Record]:
    """The lines as they are: id, raw, and where each stands."""
    if settings.data is None:
        raise BadInput("no data\ntry: data: in the matrix, or --train-jsonl FILE")
    path = Path(settings.data)
    for number, raw in jsonl.read(path):
        identifier = str(number if raw.get("id") is None else raw["id"])
        yield {"id": identifier, "raw": raw, "where": f"record {identifier} ({path.name}:{number})"}


def collate(records: Sequence[Record], settings: Settings) -> dict[str, torch.Tensor]:
    """Pad to the longest record: input_ids, attention_mask, labels, each [batch, length]; position_ids if left."""
    rows = [tokens_of(record, settings) for record in records]
    length = max(len(row.ids) for row in rows)
    left = settings.padding_side == "left"

    def padded(values: list[int], filler: int) -> list[int]:
        pad = [filler] * (length - len(values))
        return pad + values if left else values + pad

    pad_id = _pad_id(_model_name(settings), settings.trust_remote_code)
    batch = {
        "input_ids": torch.tensor([padded(row.ids, pad_id) for row in rows]),
        "attention_mask": torch.tensor([padded([1] * len(row.ids), 0) for row in rows]),
        "labels": torch.tensor([padded(row.labels, IGNORED) for row in rows]),
    }
    if left:
        batch["position_ids"] = (batch["attention_mask"].cumsum(1) - 1).clamp(min=0)
    return batch


def losses(model: torch.nn.Module, batch: Mapping[str, torch.Tensor]) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Summed cross-entropy of the next token in float32, and the number of labels."""
    inputs = {name: tensor for name, tensor in batch.items() if name != "labels" and _takes(model, name)}
    logits = model(**inputs, use_cache=False).logits
    labels = batch["labels"][:, 1:]
    total = functional.cross_entropy(
        logits[:, :-1].float().flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum"
    )
    return {"text": (total, (labels != IGNORED).sum())}


def _takes(model: torch.nn.Module, name: str) -> bool:
    parameters = inspect.signature(model.forward).parameters
    return name in parameters or (any(p.kind is p.VAR_KEYWORD for p in parameters.values()) and name != "position_ids")


# one record ------------------------------------------------------------------------------------


def tokens_of(record: Record, settings: Settings) -> Tokens:
    """A record's tokens, cut to `max_length`. Raises BadInput naming the record."""
    raw, where = record["raw"], record["where"]
    kind = next((kind for kind in KINDS if kind in raw), None)
    if kind is None:
        raise BadInput(
            f"{where} has none of messages, prompt and completion, text, input_ids\n"
            "try: one of these keys in every record"
        )
    limit = settings.max_length
    tokens = KINDS[kind](raw, where, settings).cut(limit)
    if all(label == IGNORED for label in tokens.labels[1:]):
        cut = f" within max_length {limit}" if limit else ""
        raise BadInput(
            f"{where} has no label to learn from{cut}: the mean of its loss would be 0/0, "
            "which is NaN in many trainers\n"
            "try: a longer max_length, skip_records, or mend the record"
        )
    _check_range(tokens, where, settings)
    return tokens


def _check_range(tokens: Tokens, where: str, settings: Settings) -> None:
    """Ids and positions that the model has; on a GPU another one would end the process, not raise."""
    vocabulary, positions = _limits(_config(_model_name(settings), settings.trust_remote_code))
    used = [*tokens.ids, *(label for label in tokens.labels if label != IGNORED)]
    wrong = next((token for token in used if token < 0 or (vocabulary and token >= vocabulary)), None)
    if wrong is not None:
        raise BadInput(
            f"{where} has the token {wrong}, and the model's vocabulary has {vocabulary}\n"
            "try: the tokenizer that belongs to the model, or a model whose embeddings were resized"
        )
    if positions and len(tokens.ids) > positions:
        raise BadInput(
            f"{where} has {len(tokens.ids)} tokens, and the model has {positions} positions\n"
            f"try: max_length: {positions}"
        )


def _limits(config: Any) -> tuple[int | None, int | None]:
    """(vocabulary, positions) of a model; positions only where they are a learned table."""
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    rotary = any("rope" in key or "rotary" in key for key in text.to_dict())
    positions = None if rotary else getattr(text, "max_position_embeddings", None)
    return getattr(text, "vocab_size", None), positions


def _from_ids(raw: Mapping[str, Any], where: str, settings: Settings) -> Tokens:
    ids, labels = raw["input_ids"], raw.get("labels")
    labels = ids if labels is None else labels
    lists = isinstance(ids, list) and isinstance(labels, list)
    if not lists or len(ids) != len(labels) or not all(type(token) is int for token in [*ids, *labels]):
        raise BadInput(
            f"{where}: input_ids and labels must be lists of whole numbers of the same length\n"
            "try: one label an id, -100 where there is nothing to learn"
        )
    return Tokens(list(ids), list(labels))


def _from_text(raw: Mapping[str, Any], where: str, settings: Settings) -> Tokens:
    tokenizer = _tokenizer(settings)
    ids = tokenizer(_text(raw, "text", where))["input_ids"]
    return Tokens(ids, list(ids)).closed(tokenizer.eos_token_id)


def _from_completion(raw: Mapping[str, Any], where: str, settings: Settings) -> Tokens:
    tokenizer = _tokenizer(settings)
    prompt, completion = _text(raw, "prompt", where), _text(raw, "completion", where)
    whole = prompt + completion
    return _labelled(tokenizer, whole, [(len(prompt), len(whole))], special=True).closed(tokenizer.eos_token_id)


def _from_messages(raw: Mapping[str, Any], where: str, settings: Settings) -> Tokens:
    """The chat template's text; an answer is what one more turn adds to it."""
    tokenizer, messages = _tokenizer(settings), raw["messages"]
    if not tokenizer.chat_template:
        raise BadInput(f"{where} is a chat, but the tokenizer has no chat template\ntry: prompt/completion records")
    if not isinstance(messages, list) or not any(_role(message) == "assistant" for message in messages):
        raise BadInput(
            f"{where}: messages must be a list with at least one assistant turn\n"
            'try: {"role": "assistant", "content": "..."} as its last'
        )
    whole, answers = _rendered(tokenizer, messages, where, prompt=False), []
    for index, message in enumerate(messages):
        if _role(message) == "assistant":
            start = _prefix(tokenizer, messages[:index], whole, where, prompt=True)
            answers.append((start, _prefix(tokenizer, messages[: index + 1], whole, where, prompt=False)))
    return _labelled(tokenizer, whole, answers, special=False)


def _prefix(tokenizer: Any, messages: list[Any], whole: str, where: str, *, prompt: bool) -> int:
    """How much of the conversation these turns are. Templates that rewrite earlier turns are refused."""
    text = _rendered(tokenizer, messages, where, prompt=prompt)
    if not whole.startswith(text):
        raise BadInput(
            f"{where}: the chat template writes the first {len(messages)} turns differently when more follow, "
            "so the answers can't be told from the prompts\n"
            "try: one answer a record, prompt/completion records, or input_ids with labels"
        )
    return len(text)


def _rendered(tokenizer: Any, messages: list[Any], where: str, *, prompt: bool) -> str:
    try:
        return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt))
    except Exception as error:  # a template is a program: anything may come
        raise BadInput(
            f"{where}: the chat template refused it: {first_line(error)}\n"
            "try: roles and an order that the template takes (many take no system turn), or prompt/completion records"
        ) from error


def _role(message: Any) -> str | None:
    return message.get("role") if isinstance(message, Mapping) else None


KINDS = {"messages": _from_messages, "prompt": _from_completion, "text": _from_text, "input_ids": _from_ids}


def _text(raw: Mapping[str, Any], key: str, where: str) -> str:
    text = raw.get(key)
    if not isinstance(text, str) or not text.strip():
        raise BadInput(f"{where} has no text in {key!r}\ntry: a string that is not empty")
    return text


# tokens and labels -----------------------------------------------------------------------------


def _labelled(tokenizer: Any, text: str, spans: Sequence[tuple[int, int]], *, special: bool) -> Tokens:
    """The text's tokens, with labels on those that hold a character of a span."""
    if not getattr(tokenizer, "is_fast", False):
        return _piecewise(tokenizer, text, spans, special=special)
    encoded = tokenizer(text, add_special_tokens=special, return_offsets_mapping=True)
    ids, labels = encoded["input_ids"], []
    for token, (start, stop) in zip(ids, encoded["offset_mapping"], strict=True):
        kept = any(start < last and stop > first for first, last in spans) and start < stop
        labels.append(token if kept else IGNORED)
    return Tokens(ids, labels)


def _piecewise(tokenizer: Any, text: str, spans: Sequence[tuple[int, int]], *, special: bool) -> Tokens:
    """For tokenizers without offsets: each side of a boundary by itself."""
    ids: list[int] = []
    labels: list[int] = []
    ends = sorted({0, len(text), *(end for span in spans for end in span)})
    for first, last in itertools.pairwise(ends):
        piece = tokenizer(text[first:last], add_special_tokens=special and first == 0)["input_ids"]
        if special and first == 0 and piece[-1:] == [tokenizer.eos_token_id]:
            piece = piece[:-1]
        ids += piece
        labels += piece if (first, last) in spans else [IGNORED] * len(piece)
    return Tokens(ids, labels)


# what belongs to the model ---------------------------------------------------------------------


def _tokenizer(settings: Settings) -> Any:
    return _cached_tokenizer(_model_name(settings), settings.trust_remote_code)


@functools.lru_cache(maxsize=1)
def _cached_tokenizer(name: str, trust: bool) -> Any:
    try:
        return transformers.AutoTokenizer.from_pretrained(name, **hub.options(name, trust=trust))
    except Exception as error:  # a broken tokenizer file raises anything
        raise BadInput(
            f"no tokenizer in {name}: {first_line(error)}\n"
            "try: save the tokenizer beside the model, or give records with input_ids and labels"
        ) from error


@functools.lru_cache(maxsize=1)
def _pad_id(name: str, trust: bool) -> int:
    """What the model pads or else ends with; 0 if it says neither. It is masked and ignored."""
    config = _config(name, trust)
    pad: Any = getattr(config, "pad_token_id", None)
    pad = getattr(config, "eos_token_id", None) if pad is None else pad
    vocabulary, _ = _limits(config)
    usable = type(pad) is int and pad >= 0 and (vocabulary is None or pad < vocabulary)
    return pad if usable else 0


@functools.lru_cache(maxsize=1)
def _config(name: str, trust: bool) -> Any:
    try:
        return transformers.AutoConfig.from_pretrained(name, **hub.options(name, trust=trust))
    except Exception as error:  # a broken or foreign config raises anything
        raise BadInput(hub.not_found(name, error)) from error


def _model_name(settings: Settings) -> str:
    if settings.model is None:
        raise BadInput("no model\ntry: model: in the matrix, or --model-path DIR")
    return str(settings.model)


def _version() -> tuple[int, int]:
    major, minor, *_ = transformers.__version__.split(".")
    return int(major), int(minor)
