"""The records of the file that a W&B run writes on this machine, `run-<id>.wandb`.

The format is LevelDB's log, as wandb writes it: a header of 7 bytes (`:W&B`, 0xBEE1 and a version), then blocks of
32 KiB counted from the start of the file. A block holds chunks: checksum (CRC-32 of type and payload; LevelDB itself
takes CRC-32C), length, type, payload. A record lies in one chunk (FULL) or in several (FIRST, MIDDLE, LAST); fewer
than 7 bytes at the end of a block are zeros. Each record is a protobuf message of wandb's `wandb_internal.proto`.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn, TypeAlias

Record: TypeAlias = Any
"""A protobuf message `wandb_internal.Record`, which wandb ships without static types."""

BLOCK = 32 * 1024
_FILE_HEADER = struct.pack("<4sHB", b":W&B", 0xBEE1, 0)
_CHUNK_HEADER = struct.Struct("<IHB")
_FULL, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4


class DamagedFile(ValueError):
    """Bytes inside the file are not what wandb wrote there: the message names the file, the byte and what is wrong."""


class RecordReader(Iterator[Record]):
    """The records of one file, in order.

    A file that ends in the middle of a record (a killed writer, a full disk) ends the iteration quietly, and
    `truncated` says so. Anything else that wandb cannot have written raises DamagedFile, after the records before it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.truncated = False
        """Set when the iteration has ended: the file stops in the middle of a record."""
        self._data = path.read_bytes()
        self._records = self._parse()

    def __next__(self) -> Record:
        return next(self._records)

    def _damage(self, offset: int, what: str) -> NoReturn:
        raise DamagedFile(f"{self.path}, byte {offset}: {what}")

    def _parse(self) -> Iterator[Record]:
        from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
        from wandb.proto import wandb_internal_pb2 as messages

        for offset, payload in self.payloads():
            try:
                record = messages.Record.FromString(payload)  # type: ignore[attr-defined]
            except DecodeError as error:
                raise DamagedFile(f"{self.path}, byte {offset}: not a record of this wandb ({error})") from error
            yield record

    def payloads(self) -> Iterator[tuple[int, bytes]]:
        """The whole records as (offset of the first chunk, bytes)."""
        start = 0
        parts: list[bytes] | None = None
        for offset, kind, payload in self._chunks():
            if (parts is None) != (kind in (_FULL, _FIRST)):
                self._damage(offset, f"a chunk of type {kind} cannot stand here")
            if parts is None:
                start, parts = offset, []
            parts.append(payload)
            if kind in (_FULL, _LAST):
                yield start, b"".join(parts)
                parts = None
        self.truncated |= parts is not None

    def _chunks(self) -> Iterator[tuple[int, int, bytes]]:
        """The chunks as (offset, type, payload), up to the last whole one."""
        data = self._data
        if not data.startswith(_FILE_HEADER):
            self.truncated = _FILE_HEADER.startswith(data)
            if not self.truncated:
                self._damage(0, f"not a W&B file of a known version: it starts with {data[:7]!r}")
            return
        offset = len(_FILE_HEADER)
        while offset < len(data):
            left = BLOCK - offset % BLOCK
            if left < _CHUNK_HEADER.size:
                if any(data[offset : offset + left]):
                    self._damage(offset, "the end of a block is not zero")
                offset += left
                continue
            body = offset + _CHUNK_HEADER.size
            if not any(data[offset:body]) and not any(data[body:]):
                # what a crash of the machine leaves where the data had not reached the disk
                self.truncated = True
                return
            if body > len(data):
                self.truncated = True
                return
            checksum, length, kind = _CHUNK_HEADER.unpack_from(data, offset)
            if length > left - _CHUNK_HEADER.size:
                self._damage(offset, f"a chunk of {length} bytes does not fit its block")
            if body + length > len(data):
                self.truncated = True
                return
            if zlib.crc32(data[offset + 6 : body + length]) != checksum:
                self._damage(offset, "the checksum does not match")
            if kind not in (_FULL, _FIRST, _MIDDLE, _LAST):
                self._damage(offset, f"unknown type of chunk {kind}")
            yield offset, kind, data[body : body + length]
            offset = body + length


def read_records(path: Path) -> RecordReader:
    """An iterator over the records of the file at `path`, with `truncated` set at its end: see RecordReader."""
    return RecordReader(path)


def has_ended(path: Path) -> bool:
    """Whether the file ends with the record that says that its run is over: nothing is missing then."""
    from wandb.proto import wandb_internal_pb2 as messages

    last = b""
    try:
        for _, payload in RecordReader(path).payloads():
            last = payload
    except DamagedFile:  # a block that is being written just now
        return False
    return bool(messages.Record.FromString(last).WhichOneof("record_type") == "exit")  # type: ignore[attr-defined]
