"""The known-cause catalogue: published faults, each recognised by its evidence in a trace.

Pure. It speaks only when the evidence is there, and names it; a fault that it does not know brings nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nanbisect.causes.catalogue import ENTRIES
from nanbisect.causes.trace import Trace
from nanbisect.outcome import Outcome


@dataclass(frozen=True)
class Finding:
    """A published fault that this attempt shows. All texts are plain sentences of one line, names in backticks.

    `references` are `owner/name#N` on GitHub: reports of this kind, with a cause that was found or narrowed down.
    """

    code: str
    sentence: str
    evidence: str
    mend: str
    references: tuple[str, ...] = ()


def known(event: Mapping[str, Any] | None, outcome: Outcome) -> tuple[Finding, ...]:
    """What the catalogue knows of an attempt. `event` is None without a trace.

    It is the probe's `origin` event, whole, or what an outcome keeps of it: the fields of the origin beside the others.
    """
    trace = Trace(event if event and event.get("found", True) else {})
    findings = []
    for entry in ENTRIES:
        evidence = entry.rule(trace, outcome)
        if evidence is not None:
            findings.append(Finding(entry.code, entry.sentence, evidence, entry.mend, entry.references))
    return tuple(findings)


def url(reference: str) -> str:
    """The address of `owner/name#N`; GitHub leads from an issue's number to a pull request."""
    name, _, number = reference.partition("#")
    return f"https://github.com/{name}/issues/{number}"
