"""What is free on the GPUs of this machine, asked of nvidia-smi. An edge: the rest takes it as a function.

A GPU of which nothing certain is known is left out of the answer, and then nobody waits for it: no
nvidia-smi (another maker's GPU), one that hangs, an index that may mean another card here than to CUDA.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import xml.etree.ElementTree as ET
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath

import psutil

from nanbisect.slots import Gpu, Holder

Ask = Callable[[Sequence[str]], str]
"""nvidia-smi with these arguments -> what it prints. Raises OSError or subprocess.SubprocessError."""

MIB = 1 << 20
TIMEOUT = 10.0
NAME = 40  # letters of a program's name
CARDS = ("--query-gpu=index,uuid,name,memory.total,memory.free", "--format=csv,noheader,nounits")
PROCESSES = ("--query-compute-apps=gpu_uuid,pid,used_memory,process_name", "--format=csv,noheader,nounits")
MIG_LINE = re.compile(r"^\s+MIG .*Device\s+(\d+): \(UUID: (MIG-[^)]+)\)")
CARD_LINE = re.compile(r"^GPU \d+: .*\(UUID: (GPU-[^)]+)\)")


def nvidia_smi(arguments: Sequence[str]) -> str:
    """Ask the real one."""
    program = shutil.which("nvidia-smi")
    if program is None:
        raise FileNotFoundError("nvidia-smi")
    done = subprocess.run(
        [program, *arguments], capture_output=True, text=True, timeout=TIMEOUT, check=True, stdin=subprocess.DEVNULL
    )
    return done.stdout


@dataclass(frozen=True)
class Card:
    """A row of nvidia-smi's table; memory in bytes, None for a card cut into MIG slices."""

    index: str
    uuid: str
    name: str
    total: int | None
    free: int | None


class GpuMemory:
    """Looks at slots: the words of CUDA_VISIBLE_DEVICES (an index, `GPU-...`, `MIG-...`) -> what is free there.

    After one failure nobody is asked again: nvidia-smi may hang for long on a machine with a broken GPU.
    """

    def __init__(self, environ: Mapping[str, str], *, ask: Ask = nvidia_smi) -> None:
        self.by_bus = environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"
        self.ask: Ask | None = ask

    def __call__(self, slots: Sequence[str]) -> Mapping[str, Gpu]:
        """Each slot of which something is known."""
        if self.ask is None:
            return {}
        try:
            return self._look(slots, self.ask)
        except (OSError, subprocess.SubprocessError, ValueError, ET.ParseError):
            self.ask = None
            return {}

    def _look(self, slots: Sequence[str], ask: Ask) -> dict[str, Gpu]:
        cards = [card for line in ask(CARDS).splitlines() if (card := _card(line))]
        holders = _holders(ask(PROCESSES))
        ours = own_processes()
        found = {}
        for slot in slots:
            card = self._card_of(slot, cards)
            if card is not None and card.total is not None and card.free is not None:
                found[slot] = _gpu(card.total, card.free, holders[card.uuid], ours)
        slices = {slot for slot in slots if slot.startswith("MIG-")}
        return found | (_slices(slices, ask, ours) if slices else {})

    def _card_of(self, slot: str, cards: Sequence[Card]) -> Card | None:
        """CUDA counts the fastest card first unless told otherwise: where cards differ, its numbers are its own."""
        if slot.isdecimal():
            same = self.by_bus or len({card.name for card in cards}) == 1
            fit = [card for card in cards if card.index == slot] if same else []
        else:
            fit = [card for card in cards if slot.startswith("GPU-") and card.uuid.startswith(slot)]
        return fit[0] if len(fit) == 1 else None


def own_processes() -> frozenset[int]:
    """This process and all below it: what they hold on a free slot they are about to leave."""
    pids = {os.getpid()}
    with contextlib.suppress(psutil.Error):
        pids |= {child.pid for child in psutil.Process().children(recursive=True)}
    return frozenset(pids)


def _gpu(total: int, free: int, holders: Sequence[Holder], ours: frozenset[int]) -> Gpu:
    mine = sum(holder.memory or 0 for holder in holders if holder.pid in ours)
    return Gpu(total, min(total, free + mine), tuple(holder for holder in holders if holder.pid not in ours))


def _card(line: str) -> Card | None:
    parts = [part.strip() for part in line.split(",")]
    if len(parts) < 5:
        return None
    index, uuid, *name, total, free = parts
    return Card(index, uuid, ", ".join(name), _bytes(total), _bytes(free))


def _holders(text: str) -> Mapping[str, list[Holder]]:
    found: defaultdict[str, list[Holder]] = defaultdict(list)
    for line in text.splitlines():
        parts = [part.strip() for part in line.split(",", 3)]
        if len(parts) == 4 and parts[1].isdecimal():
            found[parts[0]].append(Holder(int(parts[1]), _program(parts[3]), _bytes(parts[2])))
    return found


def _bytes(text: str) -> int | None:
    """`81559` or `81559 MiB`; None for `[N/A]`."""
    number = text.removesuffix("MiB").strip()
    return int(number) * MIB if number.isdecimal() else None


def _program(name: str) -> str:
    """The program's own name: its path and its arguments are somebody else's affair. It may hold anything."""
    words = "".join(letter for letter in name if letter.isprintable()).split()
    return PurePath(words[0]).name[:NAME] if words and not name.startswith("[") else "a program"


# MIG: only the long output has the memory of a slice, and only the list has its name ---------------


def _slices(slots: set[str], ask: Ask, ours: frozenset[int]) -> dict[str, Gpu]:
    names = _slice_names(ask(["-L"]))
    found = {}
    for card in ET.fromstring(ask(["-q", "-x"])).iter("gpu"):
        for item in card.iter("mig_device"):
            name = names.get(((card.findtext("uuid") or "").strip(), _word(item, "index")))
            total, free = (_bytes(_word(item, f"fb_memory_usage/{part}")) for part in ("total", "free"))
            if name in slots and name is not None and total is not None and free is not None:
                found[name] = _gpu(total, free, list(_slice_holders(card, item)), ours)
    return found


def _slice_names(listing: str) -> dict[tuple[str, str], str]:
    """(card, number of the slice) -> its name, from `nvidia-smi -L`."""
    names, card = {}, ""
    for line in listing.splitlines():
        if match := CARD_LINE.match(line):
            card = match[1]
        elif match := MIG_LINE.match(line):
            names[(card, match[1])] = match[2]
    return names


def _slice_holders(card: ET.Element, item: ET.Element) -> Iterator[Holder]:
    instance = _word(item, "gpu_instance_id")
    for process in card.iter("process_info"):
        if _word(process, "gpu_instance_id") == instance and _word(process, "pid").isdecimal():
            yield Holder(
                int(_word(process, "pid")),
                _program(_word(process, "process_name")),
                _bytes(_word(process, "used_memory")),
            )


def _word(element: ET.Element, path: str) -> str:
    return (element.findtext(path) or "").strip()
