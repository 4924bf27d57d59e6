"""What is taken out of a text before it is published, and what must survive."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanbisect.report.redact import Redactor

REDACTOR = Redactor(
    home="/home/amelie",
    user="amelie",
    host="node17.cluster.example.org",
    paths={"/data/exp": ".", "/data/exp/reports/demo-1": "<run>", "/opt/venv": "<python>"},
)

# Put together here, so that no scanner takes them for real ones
LONG = "abcdefghijklmnopqrstuvwxyz0123456789"


@pytest.mark.parametrize(
    "secret",
    [
        "hf_" + LONG,
        "ghp_" + LONG,
        "gho_" + LONG,
        "github_pat_" + LONG + "_" + LONG,
        "glpat-" + LONG[:20],
        "sk-" + LONG,
        "sk-proj-" + LONG,
        "AKIA" + "ABCDEFGHIJKLMNOP",
        "AIza" + LONG,
        "xoxb-" + "123456789012-abcdef",
        "eyJ" + LONG + "." + LONG + "." + LONG,
    ],
)
@pytest.mark.parametrize("around", ["{}", "token: '{}'.", "x={}, y", "(`{}`)", "https://h.example/?q={}"])
def test_secrets_are_known_by_their_form(secret: str, around: str) -> None:
    text = REDACTOR.redact(around.format(secret))
    assert secret not in text
    assert "<secret>" in text


@pytest.mark.parametrize(
    ("text", "redacted"),
    [
        ("Authorization: Bearer abc.def-123", "Authorization: Bearer <secret>"),
        ("Authorization: Basic dXNlcjpwdw==", "Authorization: Basic <secret>"),
        ("--hub-token abc123 --steps 3", "--hub-token <secret> --steps 3"),
        ("--api_key=abc123", "--api_key=<secret>"),
        ("--wandb-key 'a b c' x", "--wandb-key <secret> x"),
        ('--hub-token "cut in the mid', "--hub-token <secret> in the mid"),
        ('["--token", "abc123"]', '["--token", <secret>]'),
        ("HF_TOKEN=abc123 python x.py", "HF_TOKEN=<secret> python x.py"),
        ("export WANDB_API_KEY='abc 123'", "export WANDB_API_KEY=<secret>"),
        ("openai_api_key: abc123", "openai_api_key: <secret>"),
        ("password = hunter2", "password = <secret>"),
        ("git clone https://bob:pw@github.com/o/r", "git clone https://<login>@github.com/o/r"),
        ("-----BEGIN RSA PRIVATE KEY-----\nMIIE\n-----END RSA PRIVATE KEY-----", "<secret>"),
        ("write to amelie.b@mail.example.org, please", "write to <email>, please"),
        ("connect to 10.0.12.7:29500", "connect to <ip>:29500"),
        ("tcp://192.168.1.20/x", "tcp://<ip>/x"),
    ],
)
def test_secrets_are_known_by_their_place(text: str, redacted: str) -> None:
    assert REDACTOR.redact(text) == redacted


@pytest.mark.parametrize(
    ("text", "redacted"),
    [
        ("/home/amelie/data/x.jsonl", "~/data/x.jsonl"),
        ("/home/amelie", "~"),
        ("/home/amelie2/data/x.jsonl", "<path>/x.jsonl"),
        ("in /data/exp/m.yaml.", "in ./m.yaml."),
        ("/data/exp/reports/demo-1/report.md", "<run>/report.md"),
        ("/data/experiment/m.yaml", "<path>/m.yaml"),
        ("/x/data/exp/m.yaml", "<path>/m.yaml"),
        ('File "/opt/venv/lib/python3.11/torch/nn.py", line 3', 'File "<python>/lib/python3.11/torch/nn.py", line 3'),
        ('File "/mnt/my data/secret project/x.py", line 3', 'File "<path>/x.py", line 3'),
        ("PYTHONPATH=/a/b:/c/d", "PYTHONPATH=<path>/b:<path>/d"),
        ("gcc -I/srv/me/include -o/srv/me/out", "gcc -I<path>/include -o<path>/out"),
        ("file:///srv/me/x.bin", "<path>/x.bin"),
        ("scp host9:/srv/me/x.bin", "scp host9:<path>/x.bin"),
        ("echo >/srv/me/log.txt", "echo ><path>/log.txt"),
        ("[/srv/me/a, /srv/me/b/]", "[<path>/a, <path>/b/]"),
        ("/data/töne/é.wav", "<path>/é.wav"),
        ("//srv//me/x.bin", "<path>/x.bin"),
        ("read it./home/amelie/x.bin", "read it.~/x.bin"),
        ("x/amelie/data/exp", "x/<user>/data/exp"),
    ],
)  # fmt: skip
def test_paths_keep_what_helps(text: str, redacted: str) -> None:
    assert REDACTOR.redact(text) == redacted


@pytest.mark.parametrize(
    ("text", "redacted"),
    [
        ("amelie ran it on node17", "<user> ran it on <host>"),
        ("amelie@node17:~$", "<user>@<host>:~$"),
        ("NODE17.cluster.example.org is down", "<host> is down"),
        ("ameliepoulain node170 xnode17 amelie_model", "ameliepoulain node170 xnode17 amelie_model"),
    ],
)
def test_names_are_whole_words(text: str, redacted: str) -> None:
    assert REDACTOR.redact(text) == redacted


@pytest.mark.parametrize("name", ["root", "data", "eager", "ci", "me", ""])
def test_names_that_are_common_words_stay(name: str) -> None:
    text = "root put data for eager me ci into localhost"
    assert Redactor(user=name, host=name).redact(text) == text


@pytest.mark.parametrize(
    "text",
    [
        "CUDA version 12.4.1.3, cudnn 9.1.0.70, driver 550.54.15.1",
        "nvidia-cudnn-cu12==9.1.0.70",
        "torch 2.13.0+cu128",
        "decoder.layers.1.k_proj.weight",
        "aten/src/ATen/native/cuda/Loss.cu:250",
        "--tokenizer gpt2 --max-tokens 128 --pad-token <pad> --num_tokens=5",
        "HuggingFaceTB/SmolLM2-135M and and/or 1/2/3 3 it/s",
        "https://huggingface.co/docs/transformers/main_classes/trainer",
        "loss=3.789 grad_norm=nan lr=2e-05 a5f1e2d3c4b5a69788796a5b4c3d2e1f",
        "task-based sk-learn hf_hub_download",
        "KeyError: 'attention_mask'",
        "</s><pad>",
        "eos_token: </s>",
        "./relative/path.txt ../up/x $HOME/x ${ROOT}/y/z",
    ],
)
def test_what_a_report_needs_survives(text: str) -> None:
    assert REDACTOR.redact(text) == text


def test_no_redactor_changes_nothing() -> None:
    text = "/home/amelie hf_" + LONG
    assert Redactor.none().redact(text) == text
    assert Redactor.none().redact_json({"HF_TOKEN": text}) == {"HF_TOKEN": text}


def test_json_values_are_redacted_in_depth() -> None:
    value = {"env": {"HF_TOKEN": "abc", "N": "1"}, "argv": ["x", "/srv/a/b"], "loss": [1.5, None], "on": True}
    assert REDACTOR.redact_json(value) == {
        "env": {"HF_TOKEN": "<secret>", "N": "1"},
        "argv": ["x", "<path>/b"],
        "loss": [1.5, None],
        "on": True,
    }


@pytest.mark.parametrize(
    "piece", ["-", "/", "a/", "'/", "'/a/", "a@", "a.", "A", "A_", "1.", "~/", "<", "x@y.", "--a ", "sk-"]
)
def test_long_texts_take_no_time(piece: str) -> None:
    began = time.process_time()
    REDACTOR.redact(piece * 20_000)
    assert time.process_time() - began < 2


PIECES = st.sampled_from(
    [
        "/", "//", "/home/amelie", "/data/exp", "/opt/venv", "a", "b.c", "amelie", "node17", REDACTOR.host, "path",
        "hf_" + LONG, "sk-" + LONG, "--token", "--key=", " ", "=", ":", '"', "'", "`", "<", ">", "@", ".", "-", "~",
        "\n", "10.0.0.1", "1.2.3.4.5", "version ", "Bearer ", "HF_TOKEN=", "x@y.example", "://", "file://", "<path>",
        "<run>", "<secret>", "<user>", "é", "{", "}", "(", ")", ",", "-I", "user", "$", "\\",
    ]
)  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(st.lists(PIECES, max_size=14).map("".join))
def test_redacting_twice_is_redacting_once(text: str) -> None:
    once = REDACTOR.redact(text)
    assert REDACTOR.redact(once) == once


@settings(max_examples=100, deadline=None)
@given(st.lists(PIECES, max_size=10).map("".join), st.sampled_from(["path", "secret", "amelie", "run", "host"]))
def test_even_when_a_name_is_a_word_of_ours(text: str, name: str) -> None:
    redactor = Redactor(home=f"/{name}", user=name, host=name, paths={"/a": f"<{name}>"})
    once = redactor.redact(text)
    assert redactor.redact(once) == once
