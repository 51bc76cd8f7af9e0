"""Mutated files of every kind that weightscope reads: each is read, or refused with one line.

Checkpoints, shards (with their hash, and with a hash that fits), manifests, artifacts, exports, recipes and answers of
a hub. No crash, no hang, no code run, bounded memory, and no change of a hashed file that is not noticed.

    python tests/torture/mutate.py --count 100000 [--seed 0] [--workers 2] [--kinds shard,recipe]
"""

import argparse
import codecs
import contextlib
import datetime
import hashlib
import io
import json
import os
import pickle
import random
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import fake_training as fake
import pytest
import tomli_w
import torch
from hub_server import REPOSITORY, Hub, connect, isolate, serving
from safetensors.torch import save
from torch import nn

from weightscope._util.environment import environment
from weightscope.checkpoint import Checkpoint
from weightscope.errors import DataError, UsageError
from weightscope.fits.fitting import fit
from weightscope.fits.population_fit import load_artifact
from weightscope.population import Population, export
from weightscope.population.exporting import read_export
from weightscope.recipe import InitConfig, Recipe
from weightscope.spec import TensorSpec, WeightSpec
from weightscope.statistics.samples import WeightArray

# What reading a checkpoint never does; an audit hook sees it even inside C code.
FORBIDDEN = ("os.system", "os.exec", "os.posix_spawn", "os.fork", "subprocess.", "pickle.find_class", "socket.", "exec")
INTERESTING = (b"\x00", b"\xff", b"\x7f", b"\x80", b"[", b"{", b'"', b"-", b"9", b".", b"R", b"c", b"\x93", b"Q", b"0")
SECONDS = 20  # for one file
MEMORY = 300 << 20  # bytes that the process may grow by
ODD = (None, True, -1, 0, 1, 10**30, -(10**400), 1e308, 0.5, "", "x" * 10_000, "\0\n", "../x", [], {}, [[[]]], {"": 1})


class Undetected(AssertionError):
    """A file was changed, and read without an error although its hash does not fit."""


EXECUTED = Path(tempfile.gettempdir(), f"weightscope-was-executed-{os.getpid()}")  # a file that appears if code runs


class Evil:
    def __reduce__(self):
        return eval, (f"open({str(EXECUTED)!r}, 'w')",)


def corpus() -> list[tuple[str, bytes]]:
    """(suffix, bytes) of small sound files, and of one that would run code."""
    torch.manual_seed(0)
    state = nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.Linear(3, 2).half()).state_dict()
    state["view"] = torch.randn(4, 6).T[1:3]
    out = [(".safetensors", save({name: value.contiguous() for name, value in state.items()}, {"format": "pt"}))]
    for value, options in (
        (state, {}),
        (state, {"_use_new_zipfile_serialization": False}),
        ({"model": state, "epoch": 1}, {"pickle_protocol": 4}),
        ({"a": Evil(), "b": torch.ones(2)}, {}),
    ):
        buffer = io.BytesIO()
        torch.save(value, buffer, **options)
        out.append((".pt", buffer.getvalue()))
    out.append((".pt", pickle.dumps(Evil())))
    return out


def mutated(raw: bytes, generator: random.Random) -> bytes:
    """A changed copy; of half the zip archives a member is changed and has a right checksum."""
    if not zipfile.is_zipfile(io.BytesIO(raw)) or generator.random() < 0.5:
        return with_changes(raw, generator)
    with zipfile.ZipFile(io.BytesIO(raw)) as archive:
        members = {info.filename: archive.read(info) for info in archive.infolist()}
    name = generator.choice([*members, *(n for n in members if n.endswith("data.pkl"))])
    members[name] = with_changes(members[name], generator)
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return buffer.getvalue()


def with_changes(raw: bytes, generator: random.Random) -> bytes:
    """A copy with one to eight changes, most of them near the beginning, where headers and pickles are."""
    data = bytearray(raw)
    for _ in range(generator.choice((1, 1, 1, 2, 4, 8))):
        room = len(data) if generator.random() < 0.3 else min(len(data), 2000)
        at = generator.randrange(max(room, 1))
        match generator.randrange(7):
            case 0:
                data[at : at + 1] = bytes([generator.randrange(256)])
            case 1:
                data[at : at + 1] = generator.choice(INTERESTING)
            case 2:
                data[at:at] = generator.choice(INTERESTING) * generator.choice((1, 2, 50))
            case 3:
                del data[at : at + generator.choice((1, 4, 100))]
            case 4:
                width = generator.choice((2, 4, 8))
                number = generator.choice((0, 1, 2 ** (8 * width - 1), 2 ** (8 * width) - 1, 2 ** (4 * width)))
                data[at : at + width] = number.to_bytes(width, "little")
            case 5:
                data[at:at] = data[generator.randrange(len(data) or 1) :][: generator.choice((1, 30, 300))]
            case 6:
                if generator.random() < 0.3:
                    del data[at:]
    return bytes(data)


@dataclass(frozen=True)
class Kind:
    """One kind of file: sound ones, and what reads bytes, or raises WeightscopeError if it refuses them."""

    originals: tuple[bytes, ...]
    read: Callable[[bytes], Any]
    hashed: bool = False  # every change must be refused
    structured: bool = False  # JSON text whose values are exchanged, too


@contextlib.contextmanager
def kinds(folder: Path, wanted: tuple[str, ...] = ()) -> Iterator[dict[str, Kind]]:
    """All kinds, or some, by name; they write to `folder`."""
    makers: Mapping[str, Callable[[Path], Any]] = {
        "checkpoint": _checkpoint,
        "shard": lambda f: _shard(f, fitting_hash=False),
        "shard with its hash": lambda f: _shard(f, fitting_hash=True),
        "manifest": _manifest,
        "artifact": _artifact,
        "export": _export,
        "recipe": _recipe,
        "hub": _hub,
    }
    with contextlib.ExitStack() as stack:
        made = {}
        for name in wanted or makers:
            place = folder / name.replace(" ", "-")
            place.mkdir()
            found = makers[name](place)
            made[name] = found if isinstance(found, Kind) else stack.enter_context(found)
        yield made


def _checkpoint(folder: Path) -> Kind:
    files = corpus()
    suffixes = {raw: suffix for suffix, raw in files}

    def read(raw: bytes) -> None:
        suffix = suffixes.get(raw) or (".safetensors" if raw[8:10] == b'{"' else ".pt")
        path = folder / f"m{suffix}"
        path.write_bytes(raw)
        checkpoint = Checkpoint(path)
        for name in checkpoint:
            assert checkpoint[name].shape == checkpoint.shape(name)

    return Kind(tuple(suffixes), read)


def _shard(folder: Path, fitting_hash: bool) -> Kind:
    fake.write_population(folder / "a.pop", fake.recipe(networks=8))
    file = folder / "a.pop/shards/00000.h5"

    def read(raw: bytes) -> None:
        file.write_bytes(raw)
        if fitting_hash:
            digest = hashlib.sha256(raw).hexdigest()
            file.with_name("00000.h5.sha256").write_text(f"{digest}  00000.h5\n")
        population = Population(folder / "a.pop")
        assert population.weights().shape == (8, fake.SPEC.size)
        assert len(population.metrics["diverged"]) == 8

    return Kind((file.read_bytes(),), read, hashed=not fitting_hash)


def _manifest(folder: Path) -> Kind:
    fake.write_population(folder / "a.pop", fake.recipe(networks=8))
    file = folder / "a.pop/population.json"

    def read(raw: bytes) -> None:
        file.write_bytes(raw)
        population = Population(folder / "a.pop", partial=True)
        assert population.text()
        assert len(population.missing) < 10**7

    return Kind((file.read_bytes(),), read, structured=True)


def _artifact(folder: Path) -> Kind:
    spec = WeightSpec([TensorSpec("mlp.fc1.weight", (4, 2)), TensorSpec("mlp.fc2.weight", (2, 4))])
    weights = torch.randn(40, spec.size, generator=torch.Generator().manual_seed(0)).double().numpy()
    files = []
    for structure in ("diagonal", "dense"):
        fit(WeightArray(weights, spec), "*", structure=structure).save(folder / "made.safetensors")
        files.append((folder / "made.safetensors").read_bytes())

    def read(raw: bytes) -> None:
        (folder / "a.safetensors").write_bytes(raw)
        assert load_artifact(folder / "a.safetensors").text()

    return Kind(tuple(files), read)


def _export(folder: Path) -> Kind:
    fake.write_population(folder / "a.pop", fake.recipe(networks=8))
    export(Population(folder / "a.pop"), folder / "a.h5")

    def read(raw: bytes) -> None:
        (folder / "b.h5").write_bytes(raw)
        assert read_export(folder / "b.h5").networks == 8

    return Kind(((folder / "a.h5").read_bytes(),), read, hashed=True)


def _recipe(folder: Path) -> Kind:
    inits = [{"name": "default"}, {"name": "mimetic_mlp", "b": 0.1}]
    rates = {"training__learning_rate": {"low": 1e-3, "high": 0.1}, "training__weight_decay": [0.0, 0.1]}
    texts = [tomli_w.dumps(fake.recipe(init=inits, **rates).to_dict()).encode(), b'name = "mimetic_mlp"\nb = 0.1\n']

    def read(raw: bytes) -> None:
        (folder / "r.toml").write_bytes(raw)
        if raw.startswith(b"name"):
            InitConfig.load(folder / "r.toml")
        else:
            recipe = Recipe.load(folder / "r.toml")
            assert Recipe.parse(recipe.to_dict()) == recipe

    return Kind(tuple(texts), read)


@contextlib.contextmanager
def _hub(folder: Path) -> Iterator[Kind]:
    """One tensor of a model at a server whose file is mutated, read by ranges into an empty cache."""
    state = {f"layers.{i}.weight": torch.full((8, 8), float(i)) for i in range(4)}
    patch = pytest.MonkeyPatch()
    with serving(Hub({"model.safetensors": b""})) as hub:
        isolate(patch, folder / "cache")
        connect(patch, hub.url)

        def read(raw: bytes) -> None:
            shutil.rmtree(folder / "cache", ignore_errors=True)
            hub.files["model.safetensors"] = raw
            checkpoint = Checkpoint(f"hf://{REPOSITORY}")
            for name in checkpoint.names[1:2]:
                assert checkpoint[name].shape == checkpoint.shape(name)
            hub.requests.clear()

        try:
            yield Kind((save(state),), read)
        finally:
            patch.undo()


def exchanged(raw: bytes, generator: random.Random) -> bytes:
    """JSON text with one value replaced by an odd one, or one key left out."""
    values = json.loads(raw)
    places: list[tuple[Any, Any]] = []

    def walk(value: Any) -> None:
        items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        for key, inner in list(items):
            places.append((value, key))
            walk(inner)

    walk(values)
    holder, key = generator.choice(places)
    if generator.random() < 0.2 and isinstance(holder, dict):
        del holder[key]
    else:
        holder[key] = generator.choice(ODD)
    return json.dumps(values).encode()


def mutant(kind: Kind, generator: random.Random) -> bytes:
    """A changed copy of one of the originals."""
    raw = generator.choice(kind.originals)
    if kind.structured and generator.random() < 0.5:
        return exchanged(raw, generator)
    return mutated(raw, generator)


def attempt(kind: Kind, raw: bytes) -> bool:
    """Whether the bytes are accepted; AssertionError for an error of several lines or a change that is not noticed."""
    refused = None
    try:
        kind.read(raw)
    except (DataError, UsageError) as error:
        refused = str(error)
    if refused is not None:
        assert refused.isprintable(), repr(refused)
        return False
    if kind.hashed and raw not in kind.originals:
        raise Undetected(f"{len(raw)} bytes were accepted although they were changed")
    return True


def _watch(event: str, arguments: tuple) -> None:
    if event.startswith(FORBIDDEN) and (event != "exec" or "weightscope" not in str(arguments)):
        print(f"forbidden: {event} {arguments!r}", file=sys.stderr, flush=True)
        raise SystemError(f"forbidden: {event}")


def torture(count: int, seed: int, wanted: tuple[str, ...] = ()) -> dict[str, list[int]]:
    """Try `count` mutants; kind -> [tried, accepted]. AssertionError as of `attempt`, and if memory grew."""
    generator, tried, accepted = random.Random(seed), Counter[str](), Counter[str]()
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # kills the process, which C code cannot ignore
    with tempfile.TemporaryDirectory() as folder, kinds(Path(folder), wanted) as found:
        for kind in found.values():
            for raw in kind.originals:
                with contextlib.suppress(DataError):  # the checkpoint that would run code
                    kind.read(raw)
                assert mutant(kind, generator)
        if tuple(found) == ("checkpoint",):
            for encoding in ("cp437", "raw-unicode-escape", "latin-1"):  # of names in zip archives, texts in pickles
                codecs.lookup(encoding)
            sys.addaudithook(_watch)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for _ in range(count):
            name = generator.choice(list(found))
            raw = mutant(found[name], generator)
            signal.alarm(SECONDS)
            try:
                accepted[name] += attempt(found[name], raw)
            except BaseException:
                Path(tempfile.gettempdir(), "weightscope-mutant").write_bytes(raw)
                print(f"{name}: a mutant failed; it is kept as weightscope-mutant in the temporary folder", flush=True)
                raise
            signal.alarm(0)
            tried[name] += 1
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10
    assert grown < MEMORY, f"memory grew by {grown >> 20} MB"
    assert not EXECUTED.exists(), "code of a file was run"
    return {name: [tried[name], accepted[name]] for name in found}


def in_processes(count: int, seed: int, wanted: tuple[str, ...], workers: int) -> list[dict[str, list[int]]]:
    """The counts of `torture`, in shares, each in a fresh process: an audit hook is never removed again."""
    first = range(0, count, -(-count // workers))
    shares = [min(first.step, count - start) for start in first]
    with ProcessPoolExecutor(workers, get_context("spawn"), torch.set_num_threads, (1,)) as pool:
        return list(pool.map(torture, shares, (seed + 1000 * i for i in range(workers)), [wanted] * workers))


def main() -> None:
    """Parse arguments, run, print a table."""
    parser = argparse.ArgumentParser(description=re.sub(r"\s+", " ", (__doc__ or "").split("\n\n")[0]))
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--kinds", default="", help="names separated by commas; all by default")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    began = time.monotonic()
    wanted, tried, read = tuple(filter(None, options.kinds.split(","))), Counter[str](), Counter[str]()
    for found in in_processes(options.count, options.seed, wanted, options.workers):
        for name, (attempts, accepted) in found.items():
            tried[name] += attempts
            read[name] += accepted
    for name, count in tried.items():
        print(f"{name}: {count} mutants, {read[name]} read, {count - read[name]} refused with one line")
    if options.json is not None:
        counts = {"mutants": tried.total(), "read": read.total(), "failures": 0, "date": f"{datetime.date.today()}"}
        counts |= {"seconds": round(time.monotonic() - began), "environment": environment("cpu")}
        options.json.write_text(json.dumps({"mutate": counts}, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
