"""What is free on GPUs, by the words of nvidia-smi; which of them are slots; ports. No GPU is needed."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from nanbisect import ports
from nanbisect.errors import ExecutorError, UsageError
from nanbisect.gpus import GpuMemory
from nanbisect.machine import Occasion, cores, first_device, slot_environment, slots_of
from nanbisect.slots import Gpu, Holder, shortage

GIB = 1 << 30
CARDS = """\
0, GPU-aaaa1111-0000, NVIDIA A100-SXM4-80GB, 81920, 10240
1, GPU-bbbb2222-0000, NVIDIA A100-SXM4-80GB, 81920, 81000
2, GPU-cccc3333-0000, NVIDIA A100-SXM4-80GB, [N/A], [N/A]
"""
APPS = """\
GPU-aaaa1111-0000, 4711, 61440, /opt/secret/bin/python3.11
GPU-aaaa1111-0000, {pid}, 1024, /usr/bin/python3
GPU-bbbb2222-0000, 4712, [N/A], [Not Found]
"""
LISTING = """\
GPU 0: NVIDIA A100-SXM4-80GB (UUID: GPU-aaaa1111-0000)
GPU 2: NVIDIA A100-SXM4-80GB (UUID: GPU-cccc3333-0000)
  MIG 3g.40gb     Device  0: (UUID: MIG-1111)
  MIG 3g.40gb     Device  1: (UUID: MIG-2222)
"""
LONG = """\
<?xml version="1.0" ?>
<!DOCTYPE nvidia_smi_log SYSTEM "nvsmi_device_v12.dtd">
<nvidia_smi_log>
  <gpu id="00000000:55:00.0">
    <uuid>GPU-cccc3333-0000</uuid>
    <fb_memory_usage><total>81920 MiB</total><used>N/A</used><free>N/A</free></fb_memory_usage>
    <mig_devices>
      <mig_device><index>0</index><gpu_instance_id>3</gpu_instance_id>
        <fb_memory_usage>
          <total>40448 MiB</total><used>40000 MiB</used><free>448 MiB</free>
        </fb_memory_usage></mig_device>
      <mig_device><index>1</index><gpu_instance_id>4</gpu_instance_id>
        <fb_memory_usage>
          <total>40448 MiB</total><used>298 MiB</used><free>40150 MiB</free>
        </fb_memory_usage></mig_device>
    </mig_devices>
    <processes>
      <process_info><gpu_instance_id>3</gpu_instance_id><pid>99</pid><process_name>ollama</process_name>
        <used_memory>39000 MiB</used_memory></process_info>
    </processes>
  </gpu>
</nvidia_smi_log>
"""


def answers(arguments: Sequence[str]) -> str:
    """What nvidia-smi prints for these arguments."""
    if arguments[0].startswith("--query-gpu"):
        return CARDS
    if arguments[0].startswith("--query-compute-apps"):
        return APPS.format(pid=os.getpid())
    return LISTING if arguments[0] == "-L" else LONG


def test_an_index_and_a_uuid_find_their_card_and_who_holds_it() -> None:
    """By whole or shortened UUID; what we hold ourselves counts as free; a path stays private."""
    look = GpuMemory({}, ask=answers)
    found = look(["0", "1", "GPU-aaaa", "GPU-bbbb2222-0000"])
    assert found["0"] == found["GPU-aaaa"] == Gpu(80 * GIB, 11 * GIB, (Holder(4711, "python3.11", 60 * GIB),))
    assert found["1"].holders == (Holder(4712, "a program", None),)
    assert found["1"] == found["GPU-bbbb2222-0000"]


def test_a_program_may_be_called_anything() -> None:
    """No control characters reach a terminal or a report, and nothing of any length."""

    def odd(arguments: Sequence[str]) -> str:
        return answers(arguments).replace("[Not Found]", "/x/\x1b[31mred\u202e" + "x" * 99 + " --token secret")

    (holder,) = GpuMemory({}, ask=odd)(["1"])["1"].holders
    assert holder.name == ("[31mred" + "x" * 99)[:40]


def test_a_card_of_which_nothing_is_certain_is_left_out() -> None:
    """A card in slices has no memory of its own; a UUID of elsewhere, an ambiguous one; a card past the last."""
    look = GpuMemory({}, ask=answers)
    assert look(["2", "GPU-dddd", "GPU-", "7", "whatever"]) == {}


def test_an_index_is_ambiguous_where_cards_differ() -> None:
    """CUDA counts the fastest first, nvidia-smi by the bus: only in one order they agree."""

    def two(arguments: Sequence[str]) -> str:
        return answers(arguments).replace("0, GPU-aaaa1111-0000, NVIDIA A100-SXM4-80GB", "0, GPU-aaaa1111-0000, T4")

    assert GpuMemory({}, ask=two)(["0", "1"]) == {}
    assert set(GpuMemory({"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}, ask=two)(["0", "1"])) == {"0", "1"}
    assert set(GpuMemory({}, ask=two)(["GPU-aaaa"])) == {"GPU-aaaa"}


def test_slices_of_a_card_have_their_own_memory_and_processes() -> None:
    """MIG: the list has their names, the long output their memory."""
    found = GpuMemory({}, ask=answers)(["MIG-1111", "MIG-2222"])
    assert found["MIG-1111"] == Gpu(40448 << 20, 448 << 20, (Holder(99, "ollama", 39000 << 20),))
    assert found["MIG-2222"] == Gpu(40448 << 20, 40150 << 20)


@pytest.mark.parametrize(
    "error", [FileNotFoundError("nvidia-smi"), subprocess.TimeoutExpired("nvidia-smi", 10), ValueError("torn")]
)
def test_a_failure_is_not_asked_for_twice(error: Exception) -> None:
    """No nvidia-smi, or one that hangs: nothing is known, and nobody waits ten seconds before every cell."""
    asked: list[Sequence[str]] = []

    def ask(arguments: Sequence[str]) -> str:
        asked.append(arguments)
        raise error

    look = GpuMemory({}, ask=ask)
    assert look(["0"]) == look(["0"]) == {}
    assert len(asked) == 1


def test_what_is_short_of_memory_names_the_holders() -> None:
    """Half of the card before anything is known, the largest cell's peak after; a desktop is no holder."""
    half = Gpu(80 * GIB, 39 * GIB, (Holder(1, "small", GIB), Holder(2, "big", 40 * GIB)))
    told = shortage(half, None)
    assert told is not None
    assert told.startswith("39.0 of 80.0 GiB are free, 40.0 are needed")
    assert told.index("big (process 2, 40.0 GiB)") < told.index("small")
    assert shortage(half, 39 * GIB) is None
    assert "can't be seen" in str(shortage(Gpu(80 * GIB, GIB), None))
    assert shortage(Gpu(8 * GIB, 8 * GIB - GIB // 4), 60 * GIB) is None  # too small a card is nobody's holding


# slots -----------------------------------------------------------------------------------------

OCCASION = Occasion(environ={})
GPUS: dict[str, Any] = {"device": "cuda", "gpus": [{}, {}]}


def test_slots_are_the_gpus_that_the_training_sees() -> None:
    """In the user's words, as far as CUDA read them; what the matrix sets counts; none is there twice."""
    names = "GPU-aaaa, MIG-1111,7"
    assert slots_of(GPUS, replace(OCCASION, environ={"CUDA_VISIBLE_DEVICES": names})) == ("GPU-aaaa", "MIG-1111")
    own = {"CUDA_VISIBLE_DEVICES": "3,1"}
    assert slots_of(GPUS, replace(OCCASION, environ={"CUDA_VISIBLE_DEVICES": "0"}), own) == ("3", "1")
    assert slots_of(GPUS, replace(OCCASION, gpus="1, 1")) == ("1",)
    with pytest.raises(UsageError, match="try: --gpus 0,1"):
        slots_of(GPUS, replace(OCCASION, gpus="5"))
    with pytest.raises(UsageError, match="--gpus ,"):
        slots_of(GPUS, replace(OCCASION, gpus=","))


def test_cells_on_a_cpu_share_the_cores_unless_somebody_says_otherwise() -> None:
    """The user's or the matrix's number of threads stands; one job has all."""
    jobs = replace(OCCASION, jobs=2)
    share = str(max(1, cores() // 2))
    assert slot_environment(("cpu1",), jobs) == {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": share}
    assert slot_environment(("cpu0",), replace(OCCASION, jobs=500))["OMP_NUM_THREADS"] == "1"
    assert "OMP_NUM_THREADS" not in slot_environment(("cpu0",), OCCASION)
    assert "OMP_NUM_THREADS" not in slot_environment(("cpu0",), jobs, {"OMP_NUM_THREADS": "3"})
    assert "OMP_NUM_THREADS" not in slot_environment(("cpu0",), replace(jobs, environ={"OMP_NUM_THREADS": "3"}))
    assert slot_environment(("0", "2"), OCCASION) == {"CUDA_VISIBLE_DEVICES": "0,2"}


def test_the_check_takes_a_gpu_that_has_memory() -> None:
    """It takes the first that it sees: a full one would make every level look impossible."""
    full, empty = Gpu(80 * GIB, GIB), Gpu(80 * GIB, 80 * GIB)
    cards = {"0": full, "1": empty, "2": empty}
    look = replace(OCCASION, look=lambda slots: {slot: cards[slot] for slot in slots if slot in cards})
    assert first_device(look, {}) == {"CUDA_VISIBLE_DEVICES": "1,2,0"}
    assert first_device(replace(look, gpus="2"), {}) == {"CUDA_VISIBLE_DEVICES": "2,1,0"}
    assert first_device(look, {"CUDA_VISIBLE_DEVICES": "0,2"}) == {"CUDA_VISIBLE_DEVICES": "2,0"}
    assert first_device(look, {"CUDA_VISIBLE_DEVICES": "2,0"}) == {}
    assert first_device(look, {"CUDA_VISIBLE_DEVICES": ""}) == {}
    assert first_device(OCCASION, {}) == {}


# ports -----------------------------------------------------------------------------------------


def test_no_port_is_given_twice_and_none_that_somebody_has() -> None:
    """Whoever listens, on whatever address; and none that a system hands out by itself."""
    first = ports.free_port()
    families = [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET, "0.0.0.0")]
    families += [(socket.AF_INET6, "::1")] if socket.has_ipv6 and _has("::1") else []
    held = [socket.socket(family) for family, _ in families]
    try:
        for step, (holder, (_, address)) in enumerate(zip(held, families, strict=True), start=1):
            holder.bind((address, ports.FIRST + (first + step - ports.FIRST) % (ports.LAST - ports.FIRST)))
            holder.listen()
        taken = {holder.getsockname()[1] for holder in held}
        given = [ports.free_port() for _ in range(300)]
    finally:
        for holder in held:
            holder.close()
    assert len({first, *given}) == 301
    assert taken.isdisjoint(given)
    assert all(ports.FIRST <= port < ports.LAST for port in given)


def _has(address: str) -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind((address, 0))
    except OSError:
        return False
    return True


def test_when_every_port_is_taken_the_message_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is started that could only fail."""
    monkeypatch.setattr(ports, "_is_free", lambda port: False)
    with pytest.raises(ExecutorError, match=r"no free port(.|\n)*try: ss"):
        ports.free_port()


@pytest.mark.parametrize(
    ("argv", "elastic"),
    [
        (("/venv/bin/python3.11", "train.py"), False),
        (("accelerate", "launch", "train.py"), False),
        (("torchrun", "--nproc_per_node", "2", "train.py"), True),
        (("python", "-m", "torch.distributed.run", "train.py"), True),
        (("bash", "train.sh"), True),
    ],
)
def test_launchers_without_a_flag_learn_their_port_from_the_environment(argv: Sequence[str], elastic: bool) -> None:
    """torchrun's own variable, where a torchrun can be below."""
    found = ports.port_environment(argv, 20001)
    assert found == {"MASTER_PORT": "20001", **({"PET_MASTER_PORT": "20001"} if elastic else {})}
