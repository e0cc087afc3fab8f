"""The record of a commit: what belongs to it beside parameters and optimizer state.

Two records, current by the parity of seq like the parameters. Hyperparameters and schedulers are a text that rarely
changes; it lies in one of two places and the record says in which.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass

from shoal import errors
from shoal.data.ledger import Cursor
from shoal.sync.words import MAX_METRICS, RECORD_BYTES

_FORMAT = struct.Struct("<12Qd")
_TOTALS = struct.Struct(f"<Q{MAX_METRICS}d")
_RECORD_BYTES = 512
_RECORDS_BYTES = 2 * _RECORD_BYTES
_TEXT_BYTES = (RECORD_BYTES - _RECORDS_BYTES) // 2


@dataclass(frozen=True)
class Record:
    pass_index: int = 0
    epoch: int = 0
    position: int = 0
    step: int = 0
    samples: int = 0
    skipped: int = 0
    size: int = 0  # of the group that committed it
    size_before: int = 0  # of the group before the size last changed
    changed_at: int = 0  # step at which the size last changed
    text_place: int = 0
    text_bytes: int = 0
    edits: int = 0  # that scripts made outside of passes
    loss: float = math.nan
    totals: tuple[float, ...] = ()  # of an evaluation, over the samples so far, in the order of the metrics' names

    @property
    def cursor(self) -> Cursor:
        return Cursor(self.pass_index, self.epoch, self.position, self.step, self.samples)


class Records:
    """Reads and writes records in the arena. Only whoever leads the host writes, into the place that is not
    committed."""

    def __init__(self, memory: memoryview) -> None:
        self._memory = memory

    def read(self, seq: int) -> Record:
        at = (seq & 1) * _RECORD_BYTES
        count, *totals = _TOTALS.unpack_from(self._memory, at + _FORMAT.size)
        fields = (*_FORMAT.unpack_from(self._memory, at), tuple(totals[:count]))
        return Record(*fields)

    def text(self, place: int, size_bytes: int) -> bytes:
        at = _RECORDS_BYTES + place * _TEXT_BYTES
        return bytes(self._memory[at : at + size_bytes])

    def write(self, seq: int, record: Record) -> None:
        *fields, totals = vars(record).values()
        at = (seq & 1) * _RECORD_BYTES
        _FORMAT.pack_into(self._memory, at, *fields)
        _TOTALS.pack_into(self._memory, at + _FORMAT.size, len(totals), *totals, *[0.0] * (MAX_METRICS - len(totals)))

    packed_bytes = _RECORD_BYTES + _TEXT_BYTES

    def pack(self, seq: int) -> bytes:
        """A record and its text, for another host."""
        record, at = self.read(seq), (seq & 1) * _RECORD_BYTES
        text = self.text(record.text_place, record.text_bytes)
        return bytes(self._memory[at : at + _RECORD_BYTES]) + text.ljust(_TEXT_BYTES, b"\0")

    def unpack(self, seq: int, packed: bytes | bytearray) -> None:
        """Keep what `pack` gave as the record of that commit."""
        at = (seq & 1) * _RECORD_BYTES
        self._memory[at : at + _RECORD_BYTES] = packed[:_RECORD_BYTES]
        record = self.read(seq)
        text_at = _RECORDS_BYTES + record.text_place * _TEXT_BYTES
        self._memory[text_at : text_at + record.text_bytes] = packed[_RECORD_BYTES : _RECORD_BYTES + record.text_bytes]

    def write_text(self, committed: Record, text: bytes) -> tuple[int, int]:
        """Place a new text beside the committed one; its (place, length) for the next record."""
        if len(text) > _TEXT_BYTES:
            raise errors.OptimizerUnusable(
                f"hyperparameters and schedulers take {len(text):,} bytes as text, at most {_TEXT_BYTES:,} fit: "
                f"use fewer parameter groups"
            )
        place = 1 - committed.text_place
        at = _RECORDS_BYTES + place * _TEXT_BYTES
        self._memory[at : at + len(text)] = text
        return place, len(text)
