"""JSON lines with the file and line in every complaint."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nanbisect.trainers.sft.problems import BadInput


def read(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line number from 1, object) of every line that isn't blank. Raises BadInput."""
    number = 0
    try:
        with path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
                if text.strip():
                    yield number, _object(text, f"{path.name}:{number}")
    except UnicodeDecodeError as error:
        raise BadInput(f"{path.name}:{number} is not UTF-8 ({error.reason})\ntry: iconv -t utf-8") from error
    except OSError as error:
        raise BadInput(f"{path} can't be read: {error.strerror}\ntry: --train-jsonl with a readable file") from error


def _object(line: str, where: str) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except json.JSONDecodeError as error:
        found = f"{error.msg} at column {error.colno}"
        raise BadInput(f"{where} is not JSON: {found}\ntry: one JSON object a line") from error
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, brackets without end
        raise BadInput(f"{where} is not usable JSON: {error}\ntry: one JSON object a line") from error
    if not isinstance(value, dict):
        raise BadInput(f"{where} is {type(value).__name__}, not an object\ntry: one JSON object a line")
    return value
