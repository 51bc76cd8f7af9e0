"""`status`: how far populations are, from their shards and the times at which these were written."""

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from weightscope._util.remote import reporting
from weightscope._util.results import Result, duration, text_table
from weightscope._util.sources import POPULATION_FILE, is_population, location
from weightscope.errors import DataError, UsageError
from weightscope.population import manifest as manifests
from weightscope.population import shards

_READ = 100  # shards of a population whose times are read
_RECENT_SECONDS, _RECENT = 3600.0, 9  # the rate is that of the last hour, and of so many shards at least


@dataclass(frozen=True, repr=False)
class Status(Result):
    """How far a population is, or those of a benchmark."""

    path: Path
    networks: int  # N of the complete population; 0 if it cannot be read
    trained: int  # networks on disk
    times: tuple[tuple[float, int], ...] = field(repr=False)  # when the last shards were written, and their networks
    why: str = ""  # a population that cannot be read: what is wrong
    populations: tuple["Status", ...] = ()  # of a benchmark

    @classmethod
    def of(cls, path: Path) -> "Status":
        """Read the state of one population."""
        manifest = manifests.read(path)
        tiles = shards.tiles_on_disk(path, manifest)
        with reporting(path):
            recent = [(shards.shard_file(path, t).stat().st_mtime, manifest.rows(t)) for t in tiles[-_READ:]]
        return cls(path, manifest.networks, sum(map(manifest.rows, tiles)), tuple(sorted(recent)))

    @property
    def complete(self) -> bool:
        """Whether all networks are trained."""
        return 0 < self.networks <= self.trained and not any(part.why for part in self.populations)

    @property
    def per_hour(self) -> float:
        """Networks per hour when the last shards were written; 0 with fewer than two shards."""
        number = sum(when > self.times[-1][0] - _RECENT_SECONDS for when, _ in self.times)
        recent = self.times[-max(_RECENT, number) :]
        if not recent or recent[-1][0] == recent[0][0]:
            return 0.0
        return 3600 * sum(rows for _, rows in recent[1:]) / (recent[-1][0] - recent[0][0])

    @property
    def hours_left(self) -> float | None:
        """Hours until all networks are trained at this rate; None if it is not known."""
        left = self.networks - self.trained
        return left / self.per_hour if left and self.per_hour else 0.0 if self.complete else None

    def summary(self) -> str:
        return f"{self.path}: " + "; ".join(self._lines())

    def _lines(self) -> list[str]:
        if self.why:
            return [f"cannot be read: {self.why}"]
        lines = [f"{self.trained:,} of {self.networks:,} networks"]
        if self.times and not self.complete:
            lines.append(f"last shard {duration(max(0.0, time.time() - self.times[-1][0]))} ago")
            if self.hours_left is not None:
                seconds = 3600 * self.hours_left
                end = time.strftime("%a %H:%M", time.localtime(self.times[-1][0] + seconds))
                lines.append(f"{self.per_hour:,.0f} networks/hour; done about {end} (in {duration(seconds)})")
        return lines

    def rows(self) -> list[dict[str, Any]]:
        """One row for each population of a benchmark."""
        return [
            {
                "population": str(each.path).removeprefix(f"{self.path}/").removeprefix("runs/").removesuffix(".pop"),
                "networks": f"{each.trained:,} of {each.networks:,}",
            }
            for each in self.populations
        ]

    def text(self) -> str:
        """What there is and when it ends, and the populations of a benchmark."""
        lines = [f"{self.path}: {self._lines()[0]}", *self._lines()[1:]]
        lines += [f"{part.path}: {part._lines()[0]}" for part in self.populations if part.why]
        if self.populations:
            cells = [list(row.values()) for row in self.rows()]
            lines += ["", text_table(("population", "networks"), cells)]
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """JSON types; `hours_left` is null if it is not known."""
        values = {"path": str(self.path), "networks": self.networks, "trained": self.trained}
        values |= {"networks_per_hour": self.per_hour, "hours_left": self.hours_left, "complete": self.complete}
        values |= {"error": self.why} if self.why else {}
        return values | ({"populations": [p.to_dict() for p in self.populations]} if self.populations else {})


def status(path: str | Path) -> Status:
    """The state of a population, or of all populations below a folder, such as a benchmark's; trains nothing.

    Shards are counted, not verified (see `verify`).

    Raises:
        UsageError: if there is no population.
        DataError: if it is damaged; one of several is listed with what is wrong.

    Example:
        >>> print(status("digits.pop"))
    """
    path = location(path)
    if is_population(path):
        return Status.of(path)
    found = []
    for each in sorted(file.parent for file in path.rglob(POPULATION_FILE)):
        try:
            found.append(Status.of(each))
        except DataError as error:
            found.append(Status(each, 0, 0, (), str(error)))
    if not found:
        what = "none in it" if path.is_dir() else "no such folder"
        raise UsageError(f"{path}: expected a population's folder, or a benchmark's, found {what}")
    times = tuple(sorted(each for part in found for each in part.times))
    return Status(path, sum(p.networks for p in found), sum(p.trained for p in found), times, "", tuple(found))
