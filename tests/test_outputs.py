"""Every command that writes: all is checked first, files appear whole, and nothing of another kind is replaced."""

import json
import os
import random
import stat
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import fake_training as fake
import numpy as np
import pytest
import torch
from programs import run
from safetensors.torch import save_file

from weightscope.networks import ViT

CASES = int(os.environ.get("CASES", "24"))
FIGURES, JSON = (".png", ".pdf", ".svg"), (".json", ".txt", "")
# Command -> its arguments, and its options that take a file to write with the suffixes.
COMMANDS = {
    "inspect": (["a.pop"], {"--json": JSON}),
    "verify": (["a.pop"], {"--json": JSON}),
    "list": (["recipes"], {"--json": JSON}),
    "export": (["a.pop"], {"-o": (".h5", ".hdf5")}),
    "covariance": (["a.pop", "--select", "*"], {"-o": FIGURES, "--matrix": (".npz",), "--json": JSON}),
    "products": (["vit.safetensors", "--num-heads", "2"], {"-o": FIGURES, "--json": JSON}),
    "audit": (["vit.safetensors"], {"--json": JSON}),
    "fit-init": (
        ["a.pop", "--structure", "diagonal", "--select", "*"],
        {"-o": (".safetensors",), "--standalone": (".py",), "--json": JSON},
    ),
}
if find_spec("plotly"):  # which is optional
    COMMANDS["report"] = (["a.pop"], {"-o": (".html",)})
REQUIRED = {"export": "-o", "covariance": "-o", "products": "-o", "fit-init": "-o"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("outputs")
    fake.write_population(path / "a.pop", fake.recipe(networks=12, tile=4))
    torch.manual_seed(0)
    save_file(ViT(8, 4, 16, 1, 2, 3, in_channels=1).state_dict(), path / "vit.safetensors")
    return path


def contents(folder: Path) -> dict[str, object]:
    """What is in a folder: bytes of files, targets of links, kinds of the rest."""
    found: dict[str, object] = {}
    for path in sorted(folder.rglob("*")):
        name, mode = str(path.relative_to(folder)), path.lstat().st_mode
        if stat.S_ISLNK(mode):
            found[name] = "link", os.readlink(path)
        else:
            found[name] = path.read_bytes() if stat.S_ISREG(mode) else stat.S_IFMT(mode)
    return found


def other_file(path: Path, rng: random.Random) -> None:
    """A file of somebody else, mostly with the beginning that its suffix promises."""
    own = {
        ".png": b"\x89PNG\r\n\x1a\n a photograph",
        ".pdf": b"%PDF-1.4 a paper",
        ".svg": b"<?xml version='1.0'?><svg/>",
        ".h5": b"\x89HDF\r\n\x1a\n",
        ".py": b'"""Initialise tensors."""\nimport os\n',
    }
    if path.suffix == ".npz":  # with the names of ours
        np.savez(path, matrix=np.zeros((3, 3)), mean=np.zeros(3), names=np.array(["a"]), stops=np.array([3]))
    elif path.suffix == ".npy":
        np.save(path, np.zeros((3, 3)))
    elif path.suffix == ".safetensors":
        save_file({"w": torch.zeros(2)}, path, metadata={"format": "pt"})
    else:
        path.write_bytes(own.get(path.suffix, json.dumps({"model_type": "vit"}, indent=2).encode()))
    if rng.random() < 0.3:
        path.write_bytes(rng.choice([b"notes", b"\0", b"[1, 2]", b"# a table\n", b"\xff\xfe", b"{}"]))


def situations(folder: Path, path: Path, rng: random.Random) -> dict[str, Callable[[], Path]]:
    """Ways in which the name of an output can be taken, and the path to give then."""
    target = folder / f"target{path.suffix}"
    return {
        "another file": lambda: (other_file(path, rng), path)[1],
        "a folder": lambda: (path.mkdir(), path)[1],
        "a full folder": lambda: (path.mkdir(), (path / "notes").write_text("mine"), path)[2],
        "a pipe": lambda: (os.mkfifo(path), path)[1],
        "no folder": lambda: folder / "missing" / path.name,
        "the root": lambda: Path("/"),
        "read-only": lambda: Path("/proc") / path.name,
        "a link": lambda: (other_file(target, rng), path.symlink_to(target), path)[2],
        "a dangling link": lambda: (path.symlink_to(folder / "nowhere"), path)[1],
        "its input": lambda: folder / "vit.safetensors",
        "the population": lambda: folder / "a.pop",
        "among shards": lambda: folder / "a.pop/shards" / f"mine{path.suffix}",
        "a manifest": lambda: folder / "a.pop" / "population.json",
        "a shard": lambda: next((folder / "a.pop" / "shards").glob("*.h5")),
        "too long": lambda: folder / f"{'x' * 300}{path.suffix}",
    }


@pytest.mark.parametrize("seed", range(CASES))
def test_what_cannot_be_written_is_refused_before_anything_is(
    seed: int, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rng = random.Random(seed)
    command = rng.choice(list(COMMANDS))
    given, options = COMMANDS[command]
    victim = rng.choice(list(options))
    work = folder / f"case-{seed}"
    work.mkdir()
    monkeypatch.chdir(folder)
    paths = {name: work / f"out{i}{rng.choice(options[name])}" for i, name in enumerate(options)}
    chosen = {victim, REQUIRED.get(command, victim)} | {name for name in options if rng.random() < 0.3}
    ways = situations(folder, paths[victim], rng)
    ways["another output"] = lambda: next((paths[n] for n in sorted(chosen - {victim})), Path("/"))
    way = rng.choice(list(ways))
    arguments = [command, *given]
    paths[victim] = ways[way]()
    before = contents(folder)
    for name in sorted(chosen):
        arguments += [name, str(paths[name])]
    code, _, err = run(*arguments, capsys=capsys)
    assert code in (1, 2, 3), (way, arguments)
    assert len(err.strip().splitlines()) == 1, err
    assert "internal error" not in err
    assert contents(folder) == before, (way, arguments)


@pytest.mark.parametrize("command", COMMANDS)
def test_what_a_command_wrote_it_may_replace(
    command: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With all options, twice: the same files with the same bytes, and no other. An .npy cannot say whose it is."""
    monkeypatch.chdir(folder)
    given, options = COMMANDS[command]
    before = contents(folder)
    for suffix in range(max(map(len, options.values()))):
        paths = [f for n, s in options.items() for f in (n, tmp_path / f"out{len(n)}{s[suffix % len(s)]}")]
        written = []
        for _ in range(2):
            code, _, err = run(command, *given, *paths, capsys=capsys)
            if code and any(path.suffix == ".npy" for path in written[0:1] and paths[1::2]):
                assert "nothing in it says" in err
                code, _, err = run(command, *given, *paths, "--overwrite", capsys=capsys)
            assert code == 0, err
            written.append(contents(tmp_path))
        assert written[0] == written[1]
        assert {tmp_path / name for name in written[0]} >= set(paths[1::2])
    assert contents(folder) == before


@pytest.mark.parametrize("command", [["collect", "digits-convnext", "-n", "2"], ["demo", "--networks", "16"]])
@pytest.mark.parametrize("out", ["/", "mine", "mine/notes.txt", "/proc/x", "link"])
def test_folders_of_others_are_left_alone(
    command: list[str], out: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/notes.txt").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "mine")
    before, root = contents(tmp_path), sorted(os.listdir("/"))
    code, _, err = run(*command, "-o", out, "--workers", "1", capsys=capsys)
    assert code in (1, 2, 3)
    assert "internal error" not in err
    assert contents(tmp_path) == before
    assert sorted(os.listdir("/")) == root
