"""Takes out of a text what should not be published: secrets, private paths, names of people and machines.

Pure: names and paths are passed in. Redacting twice changes nothing more. It fits the patterns listed
here and is no promise beyond them: the text is shown before it is published.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

MARKS = SECRET, EMAIL, ADDRESS, PATH, USER, HOST, LOGIN = (
    "<secret>", "<email>", "<ip>", "<path>", "<user>", "<host>", "<login>",
)  # fmt: skip

# what follows a name such as --token or API_KEY: a value in quotes, or up to the next blank or quote
_VALUE = r"""(?:<(?:secret|email|ip|path|user|host|login)>|"[^"\n]+"|'[^'\n]+'|["']?[^\s"'`,;&|)\]}]+)"""

_TOKENS = re.compile(
    r"(?<![A-Za-z0-9_-])(?:"
    r"hf_[A-Za-z0-9]{16,}"
    r"|gh[pousr]_[A-Za-z0-9]{16,}"
    r"|github_pat_[A-Za-z0-9_]{16,}"
    r"|glpat-[A-Za-z0-9_-]{16,}"
    r"|sk-[A-Za-z0-9_-]{16,}"
    r"|[rs]k_live_[A-Za-z0-9]{16,}"
    r"|xox[abeoprs]-[A-Za-z0-9-]{10,}"
    r"|(?:AKIA|ASIA)[A-Z0-9]{16}"
    r"|AIza[A-Za-z0-9_-]{30,}"
    r"|eyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]*"
    r")"
)
_KEY_BLOCK = re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.S)
_BEARER = re.compile(r"(?i)\b(bearer|authorization[\"']?\s*[:=]\s*[\"']?basic)(\s+)[A-Za-z0-9._~+/=-]{6,}")
_LOGIN = re.compile(r"(://)[^\s/@\"'`<>]+@")
_FLAG = re.compile(
    r"(?i)(?<![\w-])(--(?!(?:pad|eos|bos|unk|mask|sep|cls|image|audio)[-_]token)[\w-]*(?:token|key|secret|password|passwd|credentials))"
    rf"""(["']?(?:=|,?\s+(?!-)))({_VALUE})"""
)
_VARIABLE = re.compile(
    r"\b([A-Z][A-Z0-9_]*(?:TOKEN|KEY|SECRET|PASSWORD|PASSWD|CREDENTIALS)|TOKEN|SECRET|PASSWORD"
    r"|\w*(?i:api_?key|secret_?key|access_?key|hf_token|hub_token|auth_token|access_token|password|passwd))"
    rf"""(["']?\s*[=:]\s*)({_VALUE})"""
)
_SECRET_NAME = re.compile(r"(?i)(?:token|key|secret|password|passwd|credentials)$")
_EMAIL = re.compile(r"(?<![\w.+-])(?:[\w.+-]+@[A-Za-z0-9-]+(?:\.[A-Za-z0-9-]+)*\.[A-Za-z]{2,})+(?![\w-])")
_OCTET = r"(?:25[0-5]|2[0-4]\d|1?\d?\d)"
_ADDRESS = re.compile(rf"(?<![\w.]){_OCTET}(?:\.{_OCTET}){{3}}(?![\w]|\.\d)")
_VERSION_BEFORE = re.compile(
    r"(?i)(?:versions?|release|toolkit|driver|cu\w*|nv\w*|nccl|torch\w*|==|[<>~!]=|\bv)[\s\"':=(,-]*(?:is\s+|of\s+)?$"
)

_NAME = r"[^\s/\"'`<>|:;,()\[\]{}=]+"
_START = r"(?:(?<![\w}/])|(?<=\s-[A-Za-z]))"  # no path begins inside a word, but one may follow -I
_QUOTED = r"(?P<quote>[\"'])(?P<inner>/[^\"'`\n<>]+)(?P=quote)"  # may hold blanks
_PATH = rf"(?:file://|{_START}(?!(?<=:)//))(?:/+{_NAME})+/+(?P<last>{_NAME}/?)"

COMMON = frozenset(
    re.findall(
        r"\w+",
        """
        root user users admin administrator ubuntu debian centos test tests tester guest home data train model models
        main work worker workers node node0 node1 gpu gpus cuda cpu local localhost localdomain server dev docker python
        torch runner build batch demo step steps loss cell token tokens path secret email host login eager flash sdpa
        finite nan inf max min mean sum will may mark art the and for not all any new one two run reports report
        nanbisect nobody default none true false on off
        """,
    )
)
"""Names that are also words of nearly every report: replacing them would only hide what it says."""
SHORTEST_NAME = 3
MOST_PASSES = 8
_ANY_MARK = "|".join(map(re.escape, MARKS))


@dataclass(frozen=True)
class Redactor:
    """Replaces what identifies this machine and its user. `paths` maps literal absolute paths to words.

    The home directory becomes `~`; any other absolute path of two parts or more keeps its last part.
    """

    home: str = ""
    user: str = ""
    host: str = ""
    paths: Mapping[str, str] = field(default_factory=dict)
    off: bool = False

    @classmethod
    def none(cls) -> Redactor:
        """The redactor that changes nothing."""
        return cls(off=True)

    def redact(self, text: str) -> str:
        """The text without secrets, private paths and names.

        A mark can end what hid something else (a path right after a name), so it goes on until nothing changes.
        """
        before = None
        for _ in range(0 if self.off else MOST_PASSES):
            if text == before:
                break
            before, text = text, self._names(_addresses(self._paths(_secrets(text))))
        return text

    def redact_json(self, value: Any, name: str = "") -> Any:
        """A JSON value with every text in it redacted; all of a text whose key names a secret."""
        if self.off:
            return value
        if isinstance(value, str):
            return SECRET if value and _SECRET_NAME.search(name) else self.redact(value)
        if isinstance(value, Mapping):
            return {key: self.redact_json(item, str(key)) for key, item in value.items()}
        if isinstance(value, list):
            return [self.redact_json(item, name) for item in value]
        return value

    def _paths(self, text: str) -> str:
        return self._path_pattern.sub(self._shortened, text)

    def _shortened(self, match: re.Match[str]) -> str:
        """A known path's word; else `<path>/` and the last part. What was redacted before stays."""
        if match["kept"]:
            return match[0]
        if match["known"]:
            return self._known[match["known"]]
        if match["quote"]:
            return f"{match['quote']}{self._unquoted(match['inner'])}{match['quote']}"
        return f"{PATH}/{match['last']}"

    def _unquoted(self, path: str) -> str:
        for known, word in self._known.items():
            if path == known or path.startswith(f"{known}/"):
                return word + path[len(known) :]
        parts = [part for part in path.split("/") if part.strip()]
        return f"{PATH}/{parts[-1]}" if len(parts) > 1 else path

    @cached_property
    def _known(self) -> Mapping[str, str]:
        """The paths that have a word of their own, longest first."""
        given = {**({self.home: "~"} if self.home else {}), **self.paths}
        known = {path.rstrip("/"): word for path, word in given.items() if path.rstrip("/")}
        return dict(sorted(known.items(), key=lambda item: -len(item[0])))

    @cached_property
    def _path_pattern(self) -> re.Pattern[str]:
        """All kinds of paths in one pattern, so that none is found in what another was turned into."""
        words = sorted({*MARKS, *self._known.values()} - {"", ".", "..", "~"}, key=len, reverse=True)
        kept = rf"(?P<kept>(?:(?<![\w.])(?:\.\.?|~)|{'|'.join(map(re.escape, words))})(?:/+{_NAME})+)"
        known = rf"{_START}(?P<known>{'|'.join(map(re.escape, self._known)) or '(?!)'})(?![\w-]|\.\w)"
        return re.compile("|".join((kept, known, _QUOTED, _PATH)))

    def _names(self, text: str) -> str:
        for pattern, mark in self._people:
            text = pattern.sub(partial(_named, mark), text)
        return text

    @cached_property
    def _people(self) -> tuple[tuple[re.Pattern[str], str], ...]:
        """Patterns of the user's and host's names. Marks are matched first, so that no name is found in one."""
        wanted = ((self.host, HOST, re.I), (self.host.split(".")[0], HOST, re.I), (self.user, USER, 0))
        return tuple(
            (re.compile(rf"{_ANY_MARK}|(?P<name>(?<!\w){re.escape(name)}(?!\w))", flag), mark)
            for name, mark, flag in wanted
            if len(name) >= SHORTEST_NAME and name.lower() not in COMMON
        )


def _named(mark: str, match: re.Match[str]) -> str:
    return mark if match["name"] else match[0]


def _secrets(text: str) -> str:
    text = _KEY_BLOCK.sub(SECRET, text)
    text = _LOGIN.sub(rf"\1{LOGIN}@", text)
    text = _TOKENS.sub(SECRET, text)
    text = _BEARER.sub(rf"\1\2{SECRET}", text)
    for named in (_FLAG, _VARIABLE):
        text = named.sub(_hidden, text)
    return _EMAIL.sub(EMAIL, text)


def _hidden(match: re.Match[str]) -> str:
    """The name and its separator, without the value; a plain number is no secret, and a mark stays."""
    return match[0] if match[3] in MARKS or match[3].strip("\"'").isdigit() else f"{match[1]}{match[2]}{SECRET}"


def _addresses(text: str) -> str:
    """IPv4 addresses, but not versions of four parts."""

    def mark(match: re.Match[str]) -> str:
        before = text[max(0, match.start() - 40) : match.start()]
        return match[0] if _VERSION_BEFORE.search(before) else ADDRESS

    return _ADDRESS.sub(mark, text)
