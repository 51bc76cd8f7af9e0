"""Mutated checkpoints: each is read or refused with one line; no crash, no hang, no code run, bounded memory.

The test tries a few hundred. Run as a script for more:

    python tests/test_checkpoint_fuzz.py --count 20000 [--seed 0]
"""

import argparse
import codecs
import io
import os
import pickle
import random
import resource
import signal
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

import torch
from safetensors.torch import save
from torch import nn

from weightscope.checkpoint import Checkpoint
from weightscope.errors import DataError, UsageError

MEMORY = 200 << 20  # bytes more than the imports
SECONDS = 10  # for one file
# What reading a checkpoint never does; an audit hook sees it even inside C code.
FORBIDDEN = ("os.system", "os.exec", "os.posix_spawn", "os.fork", "subprocess.", "pickle.find_class", "socket.", "exec")
INTERESTING = (b"\x00", b"\xff", b"\x7f", b"\x80", b"[", b"{", b'"', b"-", b"9", b".", b"R", b"c", b"\x93", b"Q", b"0")


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


def read_all(path: Path) -> bool:
    """Read everything; whether it was sound.

    Raises:
        AssertionError: if an error has more than one line.
    """
    try:
        checkpoint = Checkpoint(path)
        for name in checkpoint:
            assert checkpoint[name].shape == checkpoint.shape(name)
        assert checkpoint.spec.size >= 0
        message = None
    except (DataError, UsageError) as error:
        message = str(error)
    assert message is None or message.isprintable(), repr(message)
    return message is None


def _watch(event: str, arguments: tuple) -> None:
    if event.startswith(FORBIDDEN) and (event != "exec" or "weightscope" not in str(arguments)):
        print(f"forbidden: {event} {arguments!r}", file=sys.stderr, flush=True)
        raise SystemError(f"forbidden: {event}")


def fuzz(count: int, seed: int) -> str:
    """Try `count` mutations; a summary in words.

    Raises:
        AssertionError: if memory grew.
    """
    generator = random.Random(seed)
    files, sound, slowest, start = corpus(), 0, 0.0, time.monotonic()
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # kills the process, which C code cannot ignore
    with tempfile.TemporaryDirectory() as folder:
        for suffix, raw in files:  # warm: everything that is imported on first use is imported
            Path(folder, f"m{suffix}").write_bytes(raw)
            read_all(Path(folder, f"m{suffix}"))
        for encoding in ("cp437", "raw-unicode-escape", "latin-1"):  # of names in zip archives and texts in pickles
            codecs.lookup(encoding)
        sys.addaudithook(_watch)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for _ in range(count):
            suffix, raw = generator.choice(files)
            path = Path(folder, f"m{suffix}")
            path.write_bytes(mutated(raw, generator))
            signal.alarm(SECONDS)
            began = time.monotonic()
            sound += read_all(path)
            slowest = max(slowest, time.monotonic() - began)
            signal.alarm(0)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10
    assert grown < MEMORY, f"memory grew by {grown >> 20} MB"
    assert not EXECUTED.exists()
    return (
        f"{count} mutations: {sound} still sound, {count - sound} refused with one line; slowest {slowest:.2f} s, "
        f"memory +{grown >> 20} MB, {time.monotonic() - start:.0f} s"
    )


def test_mutations_are_read_or_refused():
    command = [sys.executable, __file__, "--count", "400", "--seed", "1"]
    found = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert found.returncode == 0, found.stderr[-2000:]
    assert "400 mutations" in found.stdout
    sound = int(found.stdout.split(": ")[1].split()[0])
    assert 40 < sound < 360  # a fuzzer whose files are all refused at the door tests the door


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(fuzz(options.count, options.seed))
