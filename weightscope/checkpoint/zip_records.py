"""Records of a zip archive that `torch.save` wrote: where they are, and whether they have their CRC-32."""

import bisect
import zipfile
import zlib
from collections.abc import Sequence

from weightscope.checkpoint.files import LocalFile, Region, read_bytes
from weightscope.errors import DataError


class CheckedRecords:
    """A file's uncompressed zip records; each is compared with its CRC-32 before the first of its bytes is used.

    A CRC-32 of 0 is none: `torch.serialization.set_crc32_options(False)` writes it.

    Args:
        file: the archive.
        records: its directory.

    Attributes:
        where: see `ByteReader`.
        size: see `ByteReader`.
        places: record name -> (position, bytes).

    Raises:
        DataError: if records are compressed, duplicated, overlap, or are outside the file.
    """

    def __init__(self, file: LocalFile, records: list[zipfile.ZipInfo]) -> None:
        self.where = file.where
        self.size = file.size
        self.places = _places(file, records)
        self._file = file
        stated = {record.orig_filename: record.CRC for record in records}
        self._ordered = sorted((start, start + size, name) for name, (start, size) in self.places.items() if size)
        self._pending = {name: stated[name] for _, _, name in self._ordered if stated[name]}

    def prepare(self, start: int, stop: int) -> Region:
        """See `ByteReader.prepare`.

        Raises:
            DataError: on a checksum mismatch.
        """
        first = max(0, bisect.bisect_right(self._ordered, (start, self.size, "")) - 1)
        for begin, end, name in self._ordered[first:]:
            if begin >= stop:
                break
            if start < end:
                self._check(begin, end, name)
        return self._file

    def expect(self, parts: Sequence[tuple[int, int]]) -> None:
        """See `ByteReader.expect`; nothing to do."""

    def whole(self) -> LocalFile:
        """See `ByteReader.whole`."""
        self.check_all()
        return self._file

    def check_all(self) -> bool:
        """Compare every record; whether all of them have a CRC-32.

        Raises:
            DataError: on a checksum mismatch.
        """
        complete = len(self._pending) == len(self._ordered)
        for place in self._ordered:
            self._check(*place)
        return complete

    def _check(self, start: int, stop: int, name: str) -> None:
        if name not in self._pending:
            return
        found = 0
        for piece in self._file.pieces(start, stop):
            found = zlib.crc32(piece, found)
        if found != self._pending[name]:
            raise DataError(
                f"{self.where}: checksum mismatch in its record {ascii(name)[:100]}: expected CRC-32 "
                f"{self._pending[name]:08x}, found {found:08x}; download it again"
            )
        del self._pending[name]


def _places(file: LocalFile, records: list[zipfile.ZipInfo]) -> dict[str, tuple[int, int]]:
    """Record name -> (position, bytes); names are unique, records do not overlap, and none is compressed."""
    out: dict[str, tuple[int, int]] = {}
    end = 0
    for record in sorted(records, key=lambda r: r.header_offset):
        place = f"{file.where}: its record {ascii(record.filename)[:100]}"
        if record.compress_type != zipfile.ZIP_STORED or record.flag_bits & 1:
            raise DataError(f"{place} is compressed or encrypted, which torch.save never does")
        if record.header_offset < end or record.header_offset + 30 > file.size:
            raise DataError(f"{place} overlaps another or is outside the file")
        local = read_bytes(file, record.header_offset, record.header_offset + 30)
        start = record.header_offset + 30 + int.from_bytes(local[26:28], "little")
        start += int.from_bytes(local[28:30], "little")
        end = start + record.file_size
        if local[:4] != b"PK\x03\x04" or record.file_size != record.compress_size or end > file.size:
            raise DataError(f"{place} is damaged or truncated; download it again")
        if record.orig_filename in out:
            raise DataError(f"{place} is duplicated")
        out[record.orig_filename] = (start, record.file_size)
    return out
