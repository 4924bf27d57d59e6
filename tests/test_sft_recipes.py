"""The built-in trainer's thinking parts, in-process: data, labels, batches, losses, and its complaints."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st

from nanbisect.trainers.sft import check, effect, losses, setup
from nanbisect.trainers.sft.diary import Diary
from nanbisect.trainers.sft.job import Job
from nanbisect.trainers.sft.problems import BadInput, Unsupported, out_of_memory
from nanbisect.trainers.sft.recipes import causal_lm, hub, jsonl
from nanbisect.trainers.sft.recipes.load import chosen_records, load, user_code
from nanbisect.trainers.sft.view import Settings, plan_of, read_by
from tests import tiny

IGNORED = causal_lm.IGNORED
CPU = torch.device("cpu")


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A folder with a tiny checkpoint, made once a session for the same arguments."""
    made: dict[str, Path] = {}

    def make(family: str = "llama", **kwargs: Any) -> Path:
        key = f"{family} {sorted(kwargs)} {[id(value) for value in kwargs.values()]}"
        if key not in made:
            made[key] = tiny.checkpoint(tmp_path_factory.mktemp(family), family, **kwargs)
        return made[key]

    return make


@pytest.fixture(autouse=True)
def forget() -> Iterator[None]:
    """Models that tests change on disk must not come out of the recipe's caches."""
    yield
    for cache in (causal_lm._cached_tokenizer, causal_lm._config, causal_lm._pad_id, hub.answers):
        cache.cache_clear()


def job(recipe: str = "causal-lm", size: int = 4, folder: Path | None = None, **given: Any) -> Job:
    """A job; what is no field of it is a setting."""
    own = {name: given.pop(name) for name in list(given) if name in Job.__dataclass_fields__}
    return Job(recipe=recipe, settings=given, folder=str(folder or "."), size=size, **own)


def view(work: Job) -> Settings:
    return Settings(work, plan_of(work))


def records_of(work: Job) -> list[Mapping[str, Any]]:
    return chosen_records(load(work.recipe), view(work), work)


def tokens(model: Path, raw: dict[str, Any], **given: Any) -> causal_lm.Tokens:
    settings = view(job(model=str(model), **given))
    return causal_lm.tokens_of({"id": "r7", "raw": raw, "where": "record r7 (data.jsonl:3)"}, settings)


def refused(*words: str) -> AbstractContextManager[Any]:
    """BadInput whose message has all words and says what to try."""
    pattern = "(?s)" + "".join(f"(?=.*{word})" for word in (*words, "\ntry: "))
    return pytest.raises(BadInput, match=pattern)


def learnt(model: Path, found: causal_lm.Tokens) -> str:
    """The text of the tokens that carry a label."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    return str(tokenizer.decode([label for label in found.labels if label != IGNORED]))


# labels ----------------------------------------------------------------------------------------


def test_chat_has_labels_on_the_answers_and_their_end_only(models: Any) -> None:
    turns = [
        ("system", "be a number"),
        ("user", "is it"),
        ("assistant", "the loss"),
        ("user", "so"),
        ("assistant", "a"),
    ]
    raw = {"messages": [{"role": role, "content": content} for role, content in turns]}
    found = tokens(models(), raw)
    assert learnt(models(), found) == "the loss<|im_end|>\na<|im_end|>\n"
    tokenizer = tiny.tokenizer()
    whole = tokenizer.apply_chat_template(raw["messages"], tokenize=False)
    assert found.ids == tokenizer(whole, add_special_tokens=False)["input_ids"]
    assert all(label in (token, IGNORED) for token, label in zip(found.ids, found.labels, strict=True))


def test_completion_is_tokenised_with_its_prompt_and_ended(models: Any) -> None:
    found = tokens(models(), {"prompt": "the loss is", "completion": " finite"})
    tokenizer = tiny.tokenizer()
    assert found.ids == [*tokenizer("the loss is finite")["input_ids"], tokenizer.eos_token_id]
    assert learnt(models(), found) == " finite</s>"


def test_a_token_across_the_boundary_carries_a_label(models: Any) -> None:
    found = tokens(models(), {"prompt": "the loss is not a num", "completion": "ber"})
    assert found.ids[:-1] == tiny.tokenizer()("the loss is not a number")["input_ids"]
    assert learnt(models(), found) == " number</s>"


@pytest.mark.parametrize("adds", ["", "bos", "bos eos"])
@pytest.mark.parametrize("raw", [{"text": "the loss is"}, {"prompt": "the loss", "completion": " is"}])
def test_one_beginning_and_one_end_whatever_the_tokenizer_adds(models: Any, adds: str, raw: dict[str, str]) -> None:
    model = models(tokens=tiny.tokenizer(adds=adds))
    found = tokens(model, raw)
    plain = tiny.tokenizer()("the loss is")["input_ids"]
    assert found.ids == [*([1] if adds else []), *plain, 2]
    if "text" in raw:
        assert found.labels == found.ids
    else:
        assert learnt(model, found) == " is</s>"


@given(prompt=st.text(min_size=1, max_size=12), completion=st.text(min_size=1, max_size=12))
def test_labels_cover_the_completion_and_never_a_token_of_the_prompt_alone(prompt: str, completion: str) -> None:
    tokenizer = tiny.tokenizer()
    found = causal_lm._labelled(
        tokenizer, prompt + completion, [(len(prompt), len(prompt + completion))], special=False
    )
    count = sum(label != IGNORED for label in found.labels)
    rest = tokenizer.decode(found.ids[len(found.ids) - count :])
    before = tokenizer.decode(found.ids[: len(found.ids) - count])
    assert [label == IGNORED for label in found.labels] == sorted([label == IGNORED for label in found.labels])[::-1]
    assert len(found.ids) == len(found.labels)
    if prompt.isascii() and completion.isascii():
        assert rest.endswith(completion)
        assert (prompt + completion).startswith(before)
        assert len(before) <= len(prompt)


def test_a_tokenizer_without_offsets_is_cut_at_the_boundary(models: Any) -> None:
    tokenizer = tiny.tokenizer(adds="bos eos")
    found = causal_lm._piecewise(tokenizer, "the loss is finite", [(11, 18)], special=True)
    fast = causal_lm._labelled(tokenizer, "the loss is finite", [(11, 18)], special=True)
    assert found.closed(2) == fast.closed(2)


def test_ready_made_tokens_need_no_tokenizer(models: Any, tmp_path: Path) -> None:
    model = models(tokens=False, pad_token_id=7)
    data = tiny.write_lines(
        tmp_path / "d.jsonl", [{"input_ids": [5, 6, 7]}, {"input_ids": [5, 6], "labels": [-100, 9]}]
    )
    work = job(model=str(model), data=str(data), size=2)
    batch = causal_lm.collate(records_of(work), view(work))
    assert batch["input_ids"].tolist() == [[5, 6, 7], [5, 6, 7]]  # padded with the config's own
    assert batch["labels"].tolist() == [[5, 6, 7], [-100, 9, -100]]


def test_padding_on_the_left_keeps_positions(models: Any, tmp_path: Path) -> None:
    data = tiny.write_lines(tmp_path / "d.jsonl", [{"input_ids": [5, 6, 7]}, {"input_ids": [8, 9]}])
    work = job(model=str(models()), data=str(data), size=2, padding_side="left")
    batch = causal_lm.collate(records_of(work), view(work))
    assert batch["input_ids"].tolist() == [[5, 6, 7], [0, 8, 9]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [0, 1, 1]]
    assert batch["labels"].tolist() == [[5, 6, 7], [-100, 8, 9]]
    assert batch["position_ids"].tolist() == [[0, 1, 2], [0, 0, 1]]


# refusals --------------------------------------------------------------------------------------

ANSWERED = [{"role": "user", "content": "is it"}, {"role": "assistant", "content": "a number"}]


@pytest.mark.parametrize(
    ("raw", "given", "words"),
    [
        ({"label": 1}, {}, ["record r7", "data.jsonl:3", "none of messages"]),
        ({"text": "  "}, {}, ["record r7", "no text in 'text'"]),
        ({"text": 5}, {}, ["record r7", "no text in 'text'"]),
        ({"prompt": "a"}, {}, ["record r7", "no text in 'completion'"]),
        ({"prompt": "is it a number", "completion": "a"}, {"max_length": "3"}, ["record r7", "max_length 3"]),
        ({"input_ids": []}, {}, ["record r7", "no label"]),
        ({"input_ids": [5]}, {}, ["record r7", "no label"]),
        ({"input_ids": [5, 6], "labels": [-100, -100]}, {}, ["record r7", "no label", "0/0"]),
        ({"input_ids": [5, 6], "labels": [5]}, {}, ["record r7", "same length"]),
        ({"input_ids": [5, True]}, {}, ["record r7", "whole numbers"]),
        ({"input_ids": "5 6"}, {}, ["record r7", "whole numbers"]),
        ({"input_ids": [5, 300]}, {}, ["record r7", "token 300", "vocabulary has 300"]),
        ({"input_ids": [5, 6], "labels": [5, -1]}, {}, ["record r7", "token -1"]),
        ({"messages": "hello"}, {}, ["record r7", "must be a list"]),
        ({"messages": []}, {}, ["record r7", "assistant"]),
        ({"messages": ANSWERED[:1]}, {}, ["record r7", "assistant"]),
        ({"messages": [*ANSWERED, {"role": "user"}]}, {}, ["record r7", "template refused"]),
        ({"messages": [*ANSWERED, "so"]}, {}, ["record r7", "template refused"]),
    ],
)
def test_a_record_that_cannot_be_learnt_from_is_named(
    models: Any, raw: dict[str, Any], given: dict[str, str], words: list[str]
) -> None:
    with refused(*words):
        tokens(models(), raw, **given)


NO_SYSTEM = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
SHORTENS = (
    "{% for m in messages %}{{ m['role'] + ': ' + (m['content'] if loop.last else m['content'][:1]) }}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def test_templates_that_refuse_or_rewrite_turns(models: Any) -> None:
    system = {"messages": [{"role": "system", "content": "be brief"}, *ANSWERED]}
    with refused("record r7", "System role not supported", "system turn"):
        tokens(models(tokens=tiny.tokenizer(NO_SYSTEM + tiny.CHATML)), system)
    with refused("record r7", "differently when more follow"):
        tokens(models(tokens=tiny.tokenizer(SHORTENS)), {"messages": ANSWERED * 2})
    with refused("record r7", "no chat template"):
        tokens(models(tokens=tiny.tokenizer(None)), {"messages": ANSWERED})


def test_more_tokens_than_learned_positions(models: Any) -> None:
    raw = {"input_ids": [5] * (tiny.POSITIONS + 1)}
    with refused("129 tokens", "128 positions", "max_length: 128"):
        tokens(models("gpt2"), raw)
    assert len(tokens(models("gpt2"), raw, max_length="128").ids) == 128
    assert len(tokens(models("llama"), raw).ids) == 129  # rotary positions have no end


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b'{"text": "caf\xe9"}\n', ["d.jsonl:1", "not UTF-8"]),
        (b'{"text": "a"}\n{"text": \n', ["d.jsonl:2", "not JSON", "column"]),
        (b"[1, 2]\n", ["d.jsonl:1", "list, not an object"]),
        (b'{"n": ' + b"9" * 5000 + b"}\n", ["d.jsonl:1", "not usable JSON"]),
        (b"", ["no records in d.jsonl"]),
        (b"\n  \n", ["no records in d.jsonl"]),
    ],
)
def test_a_file_that_is_no_data(models: Any, tmp_path: Path, content: bytes, words: list[str]) -> None:
    data = tmp_path / "d.jsonl"
    data.write_bytes(content)
    with refused(*words):
        records_of(job(model=str(models()), data=str(data)))


def test_no_file(models: Any, tmp_path: Path) -> None:
    for path, words in ((tmp_path, "Is a directory"), (tmp_path / "gone", "No such file")):
        with refused(words):
            records_of(job(model=str(models()), data=str(path)))
    with refused("no data"):
        records_of(job(model=str(models())))


def test_a_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"text": "a"}\n')
    assert list(jsonl.read(path)) == [(1, {"text": "a"})]


# which records ---------------------------------------------------------------------------------


def ids(work: Job) -> list[str]:
    return [record["id"] for record in records_of(work)]


def test_records_are_chosen_skipped_and_repeated(tmp_path: Path) -> None:
    lines: list[dict[str, Any]] = [{"text": "a"}, {"id": "b"}, {"id": 3}, {"id": None}, {"id": "b"}]
    data = str(tiny.write_lines(tmp_path / "d.jsonl", lines))
    assert ids(job(data=data, size=3)) == ["1", "b", "3"]
    assert ids(job(data=data, size=7)) == ["1", "b", "3", "4", "b", "1", "b"]
    assert ids(job(data=data, size=3, skip_records=3)) == ["4", "b", "4"]
    assert ids(job(data=data, size=4, records=("4", "b"))) == ["b", "4", "b", "4"]
    with refused("no record with the id b2, c"):
        ids(job(data=data, records=("1", "c", "b2")))
    with refused("no record with the id 1", "after the 3 that are skipped"):
        ids(job(data=data, records=("1",), skip_records=3))
    with refused("no records in d.jsonl after the 5 that are skipped"):
        ids(job(data=data, skip_records=5))


def test_records_that_share_an_id_do_not_hide_another(tmp_path: Path) -> None:
    data = str(tiny.write_lines(tmp_path / "d.jsonl", [{"id": "a"}, {"id": "a"}, {"id": "b"}]))
    assert ids(job(data=data, records=("a", "b"), size=3)) == ["a", "a", "b"]


def test_a_bad_record_that_is_skipped_does_no_harm(models: Any, tmp_path: Path) -> None:
    data = str(tiny.write_lines(tmp_path / "d.jsonl", [{"id": "bad"}, {"id": "good", "text": "the loss"}]))
    work = job(model=str(models()), data=data, skip_records=1)
    assert causal_lm.collate(records_of(work), view(work))["input_ids"].shape == (4, 3)
    with refused("record bad"):
        check.check(job(model=str(models()), data=data, size=2, folder=tmp_path), Diary(tmp_path))


def test_the_check_looks_at_every_record_that_training_meets(models: Any, tmp_path: Path) -> None:
    lines = [{"text": "the loss"}] * 3 + [{"id": "last", "text": ""}]
    data = str(tiny.write_lines(tmp_path / "d.jsonl", lines))
    assert check.check(job(model=str(models()), data=data, size=3, folder=tmp_path), Diary(tmp_path)) == "done"
    with refused("record last"):
        check.check(job(model=str(models()), data=data, size=4, folder=tmp_path), Diary(tmp_path))


# models ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_the_loss_is_transformers_own(models: Any, tmp_path: Path, family: str) -> None:
    data = str(tiny.write_lines(tmp_path / "d.jsonl", tiny.chats(3)))
    found = {}
    for side in ("right", "left"):
        work = job(model=str(models(family)), data=data, size=3, padding_side=side, attention="eager")
        model = causal_lm.model(view(work)).eval()
        batch = causal_lm.collate(records_of(work), view(work))
        total, count = causal_lm.losses(model, batch)["text"]
        own = model(**batch, use_cache=False).loss
        assert torch.allclose(total / count, own, rtol=1e-6)
        assert int(count) == sum(int((batch["labels"][row, 1:] != IGNORED).sum()) for row in range(3))
        found[side] = float(total.detach())
    assert math.isclose(found["left"], found["right"], rel_tol=1e-5)  # position_ids arrive


def test_parameters_are_counted_without_loading(models: Any) -> None:
    work = job(model=str(models("qwen3")))
    loaded = causal_lm.model(view(work))
    assert causal_lm.parameter_count(view(work)) == sum(p.numel() for p in loaded.parameters())


def test_half_parameters_leave_buffers_as_transformers_has_them(models: Any) -> None:
    work = job(model=str(models()), param_dtype="bf16")
    model: Any = setup.build_model(load("causal-lm"), view(work), plan_of(work), CPU)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert model.model.rotary_emb.inv_freq.dtype == torch.float32


def break_config(folder: Path) -> None:
    (folder / "config.json").write_text("{")


def foreign_config(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps({"model_type": "vit"}))


def unusable_config(folder: Path) -> None:
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**values, "num_attention_heads": 5, "head_dim": None}))


def own_code(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps({"model_type": "mine", "auto_map": {"AutoConfig": "mine.Mine"}}))


def no_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def no_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def torn_weights(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:500])


def other_weights(folder: Path) -> None:
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**values, "intermediate_size": 96}))


@pytest.mark.parametrize(
    "spoil",
    [break_config, foreign_config, unusable_config, own_code, no_config, no_weights, torn_weights, other_weights],
)
def test_a_folder_that_is_no_model(tmp_path: Path, spoil: Callable[[Path], None]) -> None:
    folder = tiny.checkpoint(tmp_path / "m")
    spoil(folder)
    word = "trust_remote_code: true" if spoil is own_code else "save_pretrained"
    with refused(word):
        causal_lm.model(view(job(model=str(folder))))
    if spoil in (break_config, foreign_config, own_code, no_config):
        with refused(word):
            causal_lm.parameter_count(view(job(model=str(folder))))


def test_no_model_and_no_tokenizer(models: Any, tmp_path: Path) -> None:
    with refused("no model"):
        causal_lm.model(view(job()))
    with refused("no tokenizer", "input_ids"):
        tokens(models(tokens=False), {"text": "the loss"})


def test_an_attention_that_a_model_lacks_is_unsupported(models: Any) -> None:
    with pytest.raises(Unsupported) as found:
        causal_lm.model(view(job(model=str(models("gemma2")), attention="sdpa:math")))
    assert found.value.levels == {"attention": "sdpa:math"}


def test_a_hub_that_does_not_answer_is_asked_once_and_shortly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    asked: list[float] = []
    monkeypatch.setattr("time.sleep", asked.append)
    with refused(
        "someone/model", "127.0.0.1:9 was asked and did not answer", "HF_ENDPOINT", "HF_HUB_OFFLINE", "--model-path"
    ):
        causal_lm.model(view(job(model="someone/model")))
    with refused("someone/model", "--model-path"):
        causal_lm.parameter_count(view(job(model="someone/model")))
    assert asked == []  # nobody waited to ask again
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with refused("HF_HUB_OFFLINE is set"):
        causal_lm.model(view(job(model="someone/model")))


def test_memory_is_never_a_bad_model(models: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", full)
    with pytest.raises(OSError), user_code("causal-lm", "model"):
        causal_lm.model(view(job(model=str(models()))))


# losses ----------------------------------------------------------------------------------------


def channels(*pairs: tuple[float, Any]) -> dict[str, tuple[torch.Tensor, Any]]:
    return {f"c{index}": (torch.tensor(total, requires_grad=True), count) for index, (total, count) in enumerate(pairs)}


@pytest.mark.parametrize(
    ("weights", "reduction", "expected"),
    [
        (None, "mean_per_channel", (2 + 4 + 8) / 3),
        ((1.0, 8.0), "mean_per_channel", (2 + 4 * 4 + 4 * 8) / 9),
        ((3.0, 1.0, 0.0), "mean_per_channel", (3 * 2 + 4) / 4),
        (None, "token_weighted", (6 + 8 + 8) / (3 + 2 + 1)),
        ((1.0, 8.0), "token_weighted", (6 + 4 * 8 + 4 * 8) / (3 + 4 * 2 + 4 * 1)),
        ((3.0, 1.0, 0.0), "token_weighted", (3 * 6 + 8) / (3 * 3 + 2)),
    ],
)
@pytest.mark.parametrize("as_tensor", [False, True])
def test_the_losses_of_channels_together(
    weights: tuple[float, ...] | None, reduction: str, expected: float, as_tensor: bool
) -> None:
    parts = channels(*((total, torch.tensor(n) if as_tensor else n) for total, n in ((6.0, 3), (8.0, 2), (8.0, 1))))
    combined = losses.combine(parts, weights, reduction)
    assert float(combined.loss.detach()) == pytest.approx(expected, rel=1e-6)
    assert combined.numbers.tolist() == pytest.approx([expected, 6, 8, 8, 3, 2, 1], rel=1e-6)
    assert not combined.numbers.requires_grad


@pytest.mark.parametrize("reduction", ["mean_per_channel", "token_weighted"])
def test_a_channel_without_labels_is_left_out_of_both_sums(reduction: str) -> None:
    parts = channels((6.0, 3), (math.nan, 0), (8.0, 2))
    with_empty = losses.combine(parts, (1.0, 5.0, 2.0), reduction).loss
    without = losses.combine(channels((6.0, 3), (8.0, 2)), (1.0, 2.0), reduction).loss
    assert float(with_empty.detach()) == float(without.detach())


@given(
    st.lists(
        st.tuples(st.floats(0, 100, width=32), st.integers(1, 50), st.floats(0.125, 8, width=32)),
        min_size=1,
        max_size=6,
    )
)
def test_one_reduction_for_equal_counts_and_a_mean_between_the_ends(rows: list[tuple[float, int, float]]) -> None:
    weights = [weight for _, _, weight in rows]
    values = {
        reduction: float(losses.combine(channels(*((s, n) for s, n, _ in rows)), weights, reduction).loss.detach())
        for reduction in ("mean_per_channel", "token_weighted")
    }
    means = [total / count for total, count, _ in rows]
    for value in values.values():
        assert min(means) - 1e-3 <= value <= max(means) + 1e-3
    if len({count for _, count, _ in rows}) == 1:
        assert values["mean_per_channel"] == pytest.approx(values["token_weighted"], rel=1e-4, abs=1e-5)


@pytest.mark.parametrize(
    ("result", "words"),
    [
        (None, ["losses\\(\\)", "NoneType"]),
        ({}, ["at least one channel"]),
        (torch.ones(()), ["not Tensor"]),
        ({"text": torch.ones(())}, ["channel text", "not a pair"]),
        ({"text": (1.0, 3)}, ["channel text", "1.0"]),
        ({"text": (torch.ones(2, requires_grad=True), 3)}, ["channel text", "shape \\[2\\]"]),
        ({"text": (torch.ones((), dtype=torch.long), 3)}, ["channel text", "int64"]),
        ({"text": (torch.ones((), requires_grad=True), None)}, ["channel text", "NoneType"]),
        ({"text": (torch.ones((), requires_grad=True), torch.ones(2))}, ["channel text", "Tensor"]),
        ({"text": (torch.ones(()), 3)}, ["leads back to the model"]),
        ({"text": (torch.ones((), requires_grad=True), 0)}, ["no channel with a weight", "0/0"]),
    ],
)
def test_losses_of_another_shape_are_refused(result: Any, words: list[str]) -> None:
    with pytest.raises(BadInput, match="(?s)" + "".join(f"(?=.*{word})" for word in words)):
        losses.combine(result, None, "mean_per_channel")


def test_weights_must_fit_the_channels() -> None:
    with refused("3 weights", "2 channels", "c0, c1"):
        losses.combine(channels((1.0, 1), (1.0, 1)), (1.0, 2.0, 3.0), "mean_per_channel")
    with refused("2 weights", "1 channel \\(7\\)"):
        losses.combine({7: (torch.ones((), requires_grad=True), 1)}, (1.0, 2.0), "mean_per_channel")


# users' recipes --------------------------------------------------------------------------------

GOOD = """
import torch
def model(settings): return torch.nn.Linear(2, 1)
def records(settings): return [{"id": n} for n in range(3)]
def collate(records, settings): return torch.ones(len(records), 2)
def losses(model, batch): return {"text": (model(batch).sum(), len(batch))}
"""


def written(folder: Path, text: str, name: str = "mine.py") -> str:
    (folder / name).write_text(text, encoding="utf-8")
    return str(folder / name)


@pytest.fixture(autouse=True)
def imports() -> Iterator[None]:
    """What importing a recipe leaves behind."""
    path, modules = list(sys.path), set(sys.modules)
    yield
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        if name.removeprefix("_recipe_") in ("mine", "json"):
            del sys.modules[name]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("x = 1\ny = [\n", ["SyntaxError", "mine.py, line 2"]),
        ("x = 1\nraise ValueError('no')\n", ["failed in import: ValueError: no", "mine.py:2"]),
        ("import nowhere_at_all\n", ["failed in import: ModuleNotFoundError", "mine.py:1"]),
        ("import sys\nsys.exit(3)\n", ["failed in import: SystemExit: 3"]),
        ("def model(settings): pass\n", ["has no function records, collate, losses"]),
        (GOOD.replace("return [", "return 5 #"), ["failed in records: TypeError"]),
        (GOOD.replace('"id"', '"name"'), ["record 1 of mine.py has no `id`"]),
        (GOOD.replace('{"id": n}', "n"), ["record 1 of mine.py is int, not a mapping"]),
        (
            GOOD.replace("return [", "raise KeyError('column') #"),
            ["failed in records: KeyError: 'column'", "mine.py:4"],
        ),
        (GOOD.replace("return [", "raise StopIteration #"), ["failed in records: StopIteration", "mine.py:4"]),
        (GOOD.replace("return torch.ones", "return settings.nothing, torch"), ["in collate: .*no setting 'nothing'"]),
        (GOOD.replace("return torch.nn.Linear(2, 1)", "return 5"), ["model\\(\\) returned int"]),
        (GOOD.replace("Linear(2, 1)", "Linear(2, 1).requires_grad_(False)"), ["no parameter to train"]),
        (GOOD.replace("return torch.nn", "raise OSError(2, 'gone') #"), ["failed in model: .*gone", "mine.py:3"]),
    ],
)
def test_a_recipe_that_fails_is_named_with_its_line(tmp_path: Path, text: str, words: list[str]) -> None:
    work = job(written(tmp_path, text), folder=tmp_path)
    with pytest.raises(BadInput, match="(?s)" + "".join(f"(?=.*{word})" for word in words)):
        check.check(work, Diary(tmp_path))
        setup.build_model(load(work.recipe), view(work), plan_of(work), CPU)


def test_a_recipe_may_refuse_a_combination(tmp_path: Path) -> None:
    recipe = written(tmp_path, GOOD.replace("return torch.nn", "raise NotImplementedError('no flash here') #"))
    with pytest.raises(Unsupported, match="no flash here"):
        setup.build_model(load(recipe), view(job(recipe)), plan_of(job(recipe)), CPU)


def test_a_recipe_named_like_a_library_does_not_replace_it(tmp_path: Path) -> None:
    load(written(tmp_path, GOOD, "json.py"))
    assert sys.modules["json"] is json


def test_a_recipe_must_be_a_python_file(tmp_path: Path) -> None:
    with refused("no Python file", "causal-lm"):
        load(str(tmp_path / "recipe.txt"))


def test_an_attention_kernel_that_refuses_its_input_is_unsupported() -> None:
    query = torch.randn(1, 1, 4, 8, requires_grad=True)
    attend = torch.nn.functional.scaled_dot_product_attention
    with pytest.raises(Unsupported, match="no attention kernel"), setup.forced_kernel("efficient"):  # noqa: SIM117
        with user_code("mine.py", "losses"):
            attend(query, query, query)


# the rest --------------------------------------------------------------------------------------


def test_what_a_recipe_read_is_known_and_asking_is_not_reading() -> None:
    settings = view(job(batch_size="3"))
    assert "attention" in settings
    assert "nothing" not in settings
    assert read_by(settings) == frozenset()
    assert settings.batch_size == settings["batch_size"] == 3
    assert settings.get("seed") == 0
    assert read_by(settings) == {"batch_size", "seed"}


def test_a_setting_that_was_never_read_or_never_taken() -> None:
    resolved = {"read_by_recipe": ["model"], "parameter_dtypes": {"float32": 9, "bfloat16": 1}}
    assert effect.effect_of({"max_length": "8"}, frozenset({"max_length"}), resolved).failed == (
        "the recipe never read settings.max_length"
    )
    assert effect.effect_of({"max_length": "8"}, frozenset(), resolved).failed is None
    assert effect.effect_of({"param_dtype": "fp32"}, frozenset(), resolved).failed is None
    assert "float32" in str(effect.effect_of({"param_dtype": "bf16"}, frozenset(), resolved).failed)


def test_settings_that_are_no_levels() -> None:
    with pytest.raises(BadInput, match="batch_size: '0' is not a whole number"):
        plan_of(job(batch_size="0"))


def test_a_scaler_needs_parameters_in_fp32_and_an_optimizer() -> None:
    with pytest.raises(Unsupported) as found:
        setup.accelerator_for(plan_of(job(precision="fp16", param_dtype="fp16")), CPU)
    assert found.value.levels == {"precision": "fp16", "param_dtype": "fp16"}
    assert setup.accelerator_for(plan_of(job(precision="fp16")), CPU).scaler is not None
    assert setup.accelerator_for(plan_of(job(precision="fp16", optimizer="none")), CPU).scaler is None


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (MemoryError(), True),
        (RuntimeError("CUDA error: out of memory\nhints"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`"), True),
        (
            RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"),
            True,
        ),
        (OSError(12, "Cannot allocate memory"), True),
        (OSError(2, "No such file"), False),
        (RuntimeError("CUDA error: device-side assert triggered"), False),
        (ValueError("CUDA out of memory"), False),
    ],
)
def test_out_of_memory_is_told_from_failure(error: BaseException, expected: bool) -> None:
    assert out_of_memory(error) is expected


def test_levels_that_this_machine_lacks(tmp_path: Path) -> None:
    work = job(folder=tmp_path)
    assert check.why_not("attention", "sdpa:math", work, CPU) is None
    assert check.why_not("attention", "sdpa:flash", work, CPU) is None
    assert "sdpa:efficient" in str(check.why_not("attention", "sdpa:efficient", work, CPU))
    assert check.why_not("optimizer", "adamw_fused", work, CPU) is None
    assert check.why_not("optimizer", "adamw", work, CPU) is None
    assert check.why_not("batch_size", "8", work, CPU) is None
