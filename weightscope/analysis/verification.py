"""`verify`: whether the bytes of a population, an artifact or a model are those that were written."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weightscope._util.results import Result, text_table
from weightscope._util.sources import is_population
from weightscope.errors import DataError

if TYPE_CHECKING:
    from weightscope.checkpoint import Checkpoint
    from weightscope.population import Population


_MOST = 1000  # missing files that are listed


@dataclass(frozen=True, repr=False)
class Verification(Result):
    """What was compared with a checksum.

    Each file has a `name`, a `status` ("verified", "unverified", "missing", "damaged"), what was `compared` ("sha256",
    "sha1", "crc32" or empty), and `detail`: why it is not verified, and what to do.
    """

    source: str
    files: tuple[dict[str, str], ...]

    @property
    def damaged(self) -> tuple[str, ...]:
        """The details of the damaged files."""
        return tuple(row["detail"] for row in self.files if row["status"] == "damaged")

    def raise_if_damaged(self) -> None:
        """Raise DataError if a file is damaged; names the first and their number."""
        if self.damaged:
            more = f" (and {len(self.damaged) - 1} more)" if len(self.damaged) > 1 else ""
            raise DataError(f"{self.damaged[0]}{more}")

    def rows(self) -> list[dict[str, Any]]:
        return [dict(row) for row in self.files]

    def to_dict(self) -> dict[str, Any]:
        return {"source": self.source, "files": self.rows()}

    def summary(self) -> str:
        statuses = [row["status"] for row in self.files]
        kinds = ("verified", "unverified", "missing", "damaged")
        counts = [f"{n} {kind}" for kind in kinds if (n := statuses.count(kind))]
        return f"{self.source}: {', '.join(counts) or 'no files'}"

    def text(self) -> str:
        """The counts, and a table of all files that are not verified, or of all if there are few."""
        shown = [row for row in self.files if row["status"] != "verified"] or list(self.files[:20])
        cells = [(row["name"], f"{row['status']} {row['compared']}".strip(), row["detail"]) for row in shown]
        return "\n".join([self.summary(), "", text_table(("file", "", ""), cells, left=(0, 1, 2))])


def verify(source: "str | Path | Population | Checkpoint", *, download: bool = False) -> Verification:
    """Compare the files of a population, an artifact or a model with every checksum that is known of them.

    - A population: the SHA-256 and the structure of every shard.
    - An artifact: the digest beside its header.
    - A model at the hub: the digest of each cached byte range, and each file of which all is cached with the hash that
      the hub states. A file of which only ranges were read is unverified.
    - A file in huggingface_hub's cache: the hash that names it. A file of `torch.save`: the CRC-32 of its records.

    `source` is a path, `hf://org/name[@revision]`, a `Population` or a `Checkpoint`; `download` fetches what is missing
    of a hub model's files. DataError if the source cannot be read at all; damaged files are listed in the result.

    Example:
        >>> print(verify("digits.pop").text())
    """
    if is_population(source):
        return _population(Path(str(source)))
    if hasattr(source, "recipe"):
        return _population(source.path)  # type: ignore[union-attr]
    from weightscope.checkpoint import Checkpoint
    from weightscope.fits.artifact import KEY, read_contents

    checkpoint = source if isinstance(source, Checkpoint) else Checkpoint(source)
    label = str(checkpoint.source)
    if KEY in checkpoint.metadata and checkpoint.commit is None:
        name = Path(label).name
        try:
            read_contents(label)
        except DataError as error:
            return Verification(label, (_row(name, "damaged", "sha256", str(error)),))
        return Verification(label, (_row(name, "verified", "sha256"),))
    checks = checkpoint.check(download=download)
    return Verification(label, tuple(_row(c.name, c.status, c.compared, c.detail) for c in checks))


def _population(path: Path) -> Verification:
    from weightscope.population import Population, shards

    population = Population(path, partial=True)
    rows = []
    for name, error in population.check_shards():
        rows.append(_row(name, "damaged" if error else "verified", "sha256", error or ""))
    for file in (shards.shard_file(path, tile) for tile in population.missing[:_MOST]):
        if shards.hash_file(file).exists() and not file.exists():
            rows.append(_row(file.name, "damaged", detail=f"{file}: there is its checksum only; {shards.AGAIN}"))
        elif not file.exists():
            rows.append(_row(file.name, "missing", detail="not trained yet, or removed"))
    return Verification(str(path), tuple(rows))


def _row(name: str, status: str, compared: str = "", detail: str = "") -> dict[str, str]:
    return {"name": name, "status": status, "compared": compared, "detail": detail}
