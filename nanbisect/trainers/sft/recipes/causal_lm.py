"""Recipe `causal-lm`: any AutoModelForCausalLM on JSON lines of chat, prompt/completion, text or tokens.

A record is one of
    {"messages": [{"role": ..., "content": ...}, ...]}     labels on the assistant's turns only
    {"prompt": "...", "completion": "..."}                 labels on the completion only
    {"text": "..."}                                        labels on everything
    {"input_ids": [...], "labels": [...]}                  as they are; -100 is ignored
with an optional `id` (else its line number). There is one channel, `text`.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from torch.nn import functional

from nanbisect.trainers.sft.problems import BadInput, Unsupported
from nanbisect.trainers.sft.recipes import jsonl
from nanbisect.trainers.sft.view import Settings

IGNORED = -100
IMPLEMENTATIONS = {"eager": "eager", "sdpa": "sdpa", "flash": "flash_attention_2"}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
KINDS = ("messages", "prompt", "text", "input_ids")
Record = Mapping[str, Any]


def model(settings: Settings) -> torch.nn.Module:
    """The pretrained model with the wanted attention and parameter dtype."""
    attention = settings.attention
    dtype_name = "dtype" if _version() >= (4, 56) else "torch_dtype"
    try:
        loaded: torch.nn.Module = transformers.AutoModelForCausalLM.from_pretrained(
            _model_name(settings),
            attn_implementation=IMPLEMENTATIONS[attention],
            trust_remote_code=settings.trust_remote_code,
            **{dtype_name: DTYPES[settings.param_dtype]},
        )
    except (ImportError, ValueError) as error:
        if "attention" in str(error).lower() or "attn" in str(error).lower():
            raise Unsupported(_first_line(error), {"attention": attention}) from error
        raise BadInput(f"the model {settings.model} can't be loaded: {_first_line(error)}") from error
    except OSError as error:
        raise BadInput(_not_found(settings.model, error)) from error
    return loaded


def parameter_count(settings: Settings) -> int:
    """Parameters of the model, from its configuration alone; nothing is loaded."""
    config = _config(settings)
    with torch.device("meta"):
        empty = transformers.AutoModelForCausalLM.from_config(config, trust_remote_code=settings.trust_remote_code)
    return sum(parameter.numel() for parameter in empty.parameters())


def records(settings: Settings) -> Iterator[Record]:
    """Tokenised records: id, input_ids, labels (lists of the same length)."""
    if settings.data is None:
        raise BadInput("no data\ntry: data: in the matrix, or --train-jsonl FILE")
    for number, raw in jsonl.read(Path(settings.data)):
        identifier = str(raw.get("id", number))
        where = f"record {identifier} ({Path(settings.data).name}:{number})"
        yield {"id": identifier, **_tokens(raw, where, settings)}


def collate(records: list[Record], settings: Settings) -> dict[str, torch.Tensor]:
    """Pad to the longest record: input_ids, attention_mask, labels, each [batch, length]; position_ids if left."""
    length = max(len(record["input_ids"]) for record in records)
    left = settings.padding_side == "left"

    def padded(values: list[int], filler: int) -> list[int]:
        pad = [filler] * (length - len(values))
        return pad + values if left else values + pad

    pad_id = _pad_id(settings)
    batch = {
        "input_ids": torch.tensor([padded(record["input_ids"], pad_id) for record in records]),
        "attention_mask": torch.tensor([padded([1] * len(record["input_ids"]), 0) for record in records]),
        "labels": torch.tensor([padded(record["labels"], IGNORED) for record in records]),
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


def _tokens(raw: Mapping[str, Any], where: str, settings: Settings) -> dict[str, list[int]]:
    kind = next((kind for kind in KINDS if kind in raw), None)
    if kind is None:
        raise BadInput(f"{where} has none of messages, prompt and completion, text, input_ids\ntry: one of these keys in every record")
    pieces = PIECES[kind](raw, where, settings)
    ids = [token for tokens, _ in pieces for token in tokens]
    labels = [label for tokens, kept in pieces for label in (kept if isinstance(kept, list) else tokens if kept else [IGNORED] * len(tokens))]
    limit = settings.max_length
    ids, labels = ids[:limit], labels[:limit]
    if all(label == IGNORED for label in labels[1:]):
        cut = f" within max_length {limit}" if limit else ""
        raise BadInput(
            f"{where} has no label to learn from{cut}: the mean of its loss would be 0/0, which is NaN in many trainers\n"
            "try: a longer max_length, skip_records, or mend the record"
        )
    return {"input_ids": ids, "labels": labels}


def _from_ids(raw: Mapping[str, Any], where: str, settings: Settings) -> list[tuple[list[int], Any]]:
    ids, labels = raw["input_ids"], raw.get("labels")
    labels = ids if labels is None else labels
    lists = isinstance(ids, list) and isinstance(labels, list)
    if not lists or len(ids) != len(labels) or not all(isinstance(token, int) for token in [*ids, *labels]):
        raise BadInput(f"{where}: input_ids and labels must be lists of whole numbers of the same length")
    return [(ids, list(labels))]


def _from_text(raw: Mapping[str, Any], where: str, settings: Settings) -> list[tuple[list[int], Any]]:
    tokenizer = _tokenizer(settings)
    return [(tokenizer(_text(raw, "text", where))["input_ids"] + _end(tokenizer), True)]


def _from_completion(raw: Mapping[str, Any], where: str, settings: Settings) -> list[tuple[list[int], Any]]:
    tokenizer = _tokenizer(settings)
    completion = tokenizer(_text(raw, "completion", where), add_special_tokens=False)["input_ids"]
    return [(tokenizer(_text(raw, "prompt", where))["input_ids"], False), (completion + _end(tokenizer), True)]


def _from_messages(raw: Mapping[str, Any], where: str, settings: Settings) -> list[tuple[list[int], Any]]:
    """The chat template's text cut into prompts and answers: an answer is what one more turn adds."""
    tokenizer, messages = _tokenizer(settings), raw["messages"]
    if not tokenizer.chat_template:
        raise BadInput(f"{where} is a chat, but the tokenizer has no chat template\ntry: prompt/completion records")
    if not isinstance(messages, list) or not any(_role(message) == "assistant" for message in messages):
        raise BadInput(f"{where}: messages must be a list with at least one assistant turn")
    pieces, done = [], 0
    whole = _rendered(tokenizer, messages, where, prompt=False)
    for index, message in enumerate(messages):
        if _role(message) == "assistant":
            start = _prefix(tokenizer, messages[:index], whole, where, prompt=True)
            stop = _prefix(tokenizer, messages[: index + 1], whole, where, prompt=False)
            pieces += [(whole[done:start], False), (whole[start:stop], True)]
            done = stop
    pieces.append((whole[done:], False))
    return [(tokenizer(text, add_special_tokens=False)["input_ids"], kept) for text, kept in pieces if text]


def _prefix(tokenizer: Any, messages: list[Any], whole: str, where: str, *, prompt: bool) -> int:
    """How much of the conversation these turns are. Templates that rewrite earlier turns are refused."""
    text = _rendered(tokenizer, messages, where, prompt=prompt)
    if not whole.startswith(text):
        raise BadInput(
            f"{where}: the chat template changes earlier turns, so the answers can't be told from the prompts\n"
            "try: one answer a record, prompt/completion records, or input_ids with labels"
        )
    return len(text)


def _rendered(tokenizer: Any, messages: list[Any], where: str, *, prompt: bool) -> str:
    try:
        return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt))
    except Exception as error:  # a template is a program: anything may come
        raise BadInput(f"{where}: the chat template refused it: {_first_line(error)}") from error


def _role(message: Any) -> str | None:
    return message.get("role") if isinstance(message, Mapping) else None


PIECES = {"input_ids": _from_ids, "text": _from_text, "prompt": _from_completion, "messages": _from_messages}


def _text(raw: Mapping[str, Any], key: str, where: str) -> str:
    text = raw.get(key)
    if not isinstance(text, str) or not text.strip():
        raise BadInput(f"{where} has no text in {key!r}\ntry: a string that is not empty")
    return text


def _end(tokenizer: Any) -> list[int]:
    return [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]


def _pad_id(settings: Settings) -> int:
    try:
        tokenizer = _tokenizer(settings)
    except BadInput:
        return 0  # tokens came ready-made; padding is masked and ignored
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    return int(pad or 0)


def _tokenizer(settings: Settings) -> Any:
    return _cached_tokenizer(_model_name(settings), settings.trust_remote_code)


@functools.lru_cache(maxsize=1)
def _cached_tokenizer(name: str, trust: bool) -> Any:
    try:
        return transformers.AutoTokenizer.from_pretrained(name, trust_remote_code=trust)
    except (OSError, ValueError, ImportError) as error:
        raise BadInput(f"no tokenizer in {name}: {_first_line(error)}\ntry: save the tokenizer beside the model") from error


def _config(settings: Settings) -> Any:
    try:
        return transformers.AutoConfig.from_pretrained(_model_name(settings), trust_remote_code=settings.trust_remote_code)
    except (OSError, ValueError) as error:
        raise BadInput(_not_found(settings.model, error)) from error


def _model_name(settings: Settings) -> str:
    if settings.model is None:
        raise BadInput("no model\ntry: model: in the matrix, or --model-path DIR")
    return str(settings.model)


def _not_found(name: str, error: Exception) -> str:
    if Path(name).is_absolute():
        return f"no model in the folder {name}: {_first_line(error)}\ntry: a folder that `save_pretrained` wrote (config.json and weights)"
    return (
        f"the model {name} could not be had from the hub: {_first_line(error)}\n"
        "try: --model-path with a local folder; HF_ENDPOINT for a mirror; HF_HUB_OFFLINE=1 if it is in the cache"
    )


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def _version() -> tuple[int, int]:
    major, minor, *_ = transformers.__version__.split(".")
    return int(major), int(minor)
