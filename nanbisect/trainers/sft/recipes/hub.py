"""Models by folder or by hub id: where to look, and what to say when there is nothing.

huggingface_hub asks a hub that does not answer six times and waits in between (23 s a file, measured),
so it is asked for once, shortly, and without an answer only the cache is used.
"""

from __future__ import annotations

import functools
import os
import ssl
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from nanbisect.trainers.sft.problems import first_line

ENDPOINT = "https://huggingface.co"
SECONDS = 5.0
TRUE = ("1", "on", "yes", "true")


def options(name: str, *, trust: bool) -> dict[str, Any]:
    """Arguments of every `from_pretrained`: no network for a folder, nor for a hub that does not answer."""
    local = Path(name).is_absolute() or offline() or not answers(endpoint())
    return {"local_files_only": local, "trust_remote_code": trust}


def endpoint() -> str:
    """The hub's address: `HF_ENDPOINT`, or the hub."""
    return os.environ.get("HF_ENDPOINT", "").rstrip("/") or ENDPOINT


def offline() -> bool:
    """Whether the user said not to ask the hub."""
    return os.environ.get("HF_HUB_OFFLINE", "").lower() in TRUE


@functools.lru_cache(maxsize=4)
def answers(address: str) -> bool:
    """Whether anything answers there; any HTTP status is an answer, and so is a certificate we don't know."""
    if not address.startswith(("http://", "https://")):
        return False
    try:
        urllib.request.urlopen(urllib.request.Request(address, method="HEAD"), timeout=SECONDS).close()
    except urllib.error.HTTPError:
        return True
    except urllib.error.URLError as error:
        return isinstance(error.reason, ssl.SSLError)
    except (OSError, ValueError):
        return False
    return True


def not_found(name: str, error: Exception) -> str:
    """Why a model can't be loaded, and what to try."""
    if "trust_remote_code" in str(error):
        return f"the model {name} brings code of its own\ntry: trust_remote_code: true in the matrix, if you trust it"
    if Path(name).is_absolute():
        return (
            f"the model in the folder {name} can't be loaded: {first_line(error)}\n"
            "try: a folder that `save_pretrained` wrote (config.json and weights)"
        )
    asked = "HF_HUB_OFFLINE is set" if offline() else f"{endpoint()} was asked"
    silent = "" if offline() or answers(endpoint()) else " and did not answer"
    return (
        f"the model {name} could not be had from the hub ({asked}{silent}): {first_line(error)}\n"
        "try: --model-path with a local folder; HF_ENDPOINT for a mirror; HF_HUB_OFFLINE=1 if it is in the cache"
    )
