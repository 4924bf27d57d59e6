"""Tensors in a file, in the form of safetensors: a length, a table in JSON, the raw bytes. Nothing in it can run.

Written here and not by the library of that name, because the training's environment may lack it, and because
one tensor after another goes to the disk: there is never a second copy of all of them in memory. The library
reads these files. A sum over the bytes is kept elsewhere (the capsule's index), so that a file with a flipped
bit is refused and not trained on.
"""

from __future__ import annotations

import ctypes
import json
import os
import struct
import zlib
from typing import Any, Dict, List, NamedTuple, Sequence, Tuple

import torch

NAMES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64", "I32": "int32",
    "I16": "int16", "I8": "int8", "U8": "uint8", "BOOL": "bool", "C64": "complex64",
    "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2",
}  # fmt: skip
DTYPES: Dict[str, torch.dtype] = {name: getattr(torch, text) for name, text in NAMES.items() if hasattr(torch, text)}
CODES = {dtype: name for name, dtype in DTYPES.items()}
HEADER = 1 << 27  # bytes that a table may have
CHUNK = 1 << 26  # bytes written at once

Named = Tuple[str, torch.Tensor]


class BadFile(Exception):
    """A file that is not what it should be; the message says how."""


class Written(NamedTuple):
    """What was written: bytes, and their sum."""

    size: int
    sum: int


def size_of(tensors: Sequence[Named]) -> int:
    """Bytes that these tensors take."""
    return sum(tensor.numel() * tensor.element_size() for _, tensor in tensors)


def storable(tensor: torch.Tensor) -> bool:
    """Whether the form has a name for it: a plain dense tensor with its values in memory."""
    return tensor.layout is torch.strided and tensor.dtype in CODES and not tensor.is_meta


def write(path: str, tensors: Sequence[Named]) -> Written:
    """Write named tensors and sync them. Raises OSError."""
    ordered = sorted(tensors, key=lambda item: -item[1].element_size())  # each is then aligned to its own size
    table, offset = {}, 0
    for name, tensor in ordered:
        end = offset + tensor.numel() * tensor.element_size()
        table[name] = {"dtype": CODES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(table).encode()
    text += b" " * (-len(text) % 8)
    head = struct.pack("<Q", len(text)) + text
    total = zlib.crc32(head)
    with open(path, "wb") as file:
        file.write(head)
        for _, tensor in ordered:
            total = _write_one(file, tensor, total)
        file.flush()
        os.fsync(file.fileno())
    return Written(len(head) + offset, total)


def _write_one(file: Any, tensor: torch.Tensor, total: int) -> int:
    """The bytes of one tensor, in pieces; returns the sum so far."""
    plain = tensor.detach().cpu().contiguous()
    left, address = plain.numel() * plain.element_size(), plain.data_ptr()
    while left > 0:
        many = min(left, CHUNK)
        piece = (ctypes.c_char * many).from_address(address)
        total = zlib.crc32(piece, total)
        file.write(piece)
        left, address = left - many, address + many
    return total


def read(path: str, expected: Written) -> Dict[str, torch.Tensor]:
    """All tensors by name. Raises BadFile for anything that is not as it was written."""
    try:
        size = os.path.getsize(path)
        if size != expected.size:
            raise BadFile("%s has %d bytes, not %d: it is torn" % (os.path.basename(path), size, expected.size))
        with open(path, "rb") as file:
            return _read(file, path, expected)
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, struct.error) as error:
        raise BadFile("%s can't be read: %s" % (os.path.basename(path), error)) from error


def _read(file: Any, path: str, expected: Written) -> Dict[str, torch.Tensor]:
    start = file.read(8)
    (length,) = struct.unpack("<Q", start)
    if length > HEADER:
        raise BadFile("%s has a table of %d bytes" % (os.path.basename(path), length))
    text = file.read(length)
    total, found = zlib.crc32(text, zlib.crc32(start)), {}
    rows: List[Tuple[str, Any]] = sorted(json.loads(text).items(), key=lambda item: item[1]["data_offsets"][0])
    for name, row in rows:
        data = bytearray(row["data_offsets"][1] - row["data_offsets"][0])
        file.readinto(data)
        total = zlib.crc32(data, total)
        found[name] = _tensor(data, DTYPES[row["dtype"]], row["shape"])
    if total != expected.sum:
        raise BadFile("%s is not what was written: its sum is another" % os.path.basename(path))
    return found


def _tensor(data: bytearray, dtype: torch.dtype, shape: List[int]) -> torch.Tensor:
    if not data:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(data, dtype=dtype).reshape(shape)
