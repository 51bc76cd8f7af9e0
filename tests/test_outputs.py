"""Every command that writes: all is checked first, files appear whole, and nothing of another kind is replaced."""

from collections.abc import Callable
from pathlib import Path

import fake_training as fake
import pytest
import torch
from programs import run
from safetensors.torch import save_file

from weightscope.networks import ViT

# Command -> its arguments, and its options that take a file to write with its suffix.
COMMANDS = {
    "inspect": (["a.pop"], {"--json": ".json"}),
    "verify": (["a.pop"], {"--json": ".txt"}),
    "list": (["recipes"], {"--json": ""}),
    "export": (["a.pop"], {"-o": ".h5"}),
    "covariance": (["a.pop", "--select", "*"], {"-o": ".png", "--json": ".json"}),
    "products": (["vit.safetensors", "--num-heads", "2"], {"-o": ".pdf", "--json": ".json"}),
    "audit": (["vit.safetensors"], {"--json": ".json"}),
    "fit-init": (["a.pop", "--structure", "diagonal", "--select", "*"], {"-o": ".safetensors", "--json": ".json"}),
    "report": (["a.pop"], {"-o": ".html"}),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("outputs")
    fake.write_population(path / "a.pop", fake.recipe(networks=12, tile=4))
    torch.manual_seed(0)
    save_file(ViT(8, 4, 16, 1, 2, 3, in_channels=1).state_dict(), path / "vit.safetensors")
    return path


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def other_file(path: Path) -> Path:
    """A file of somebody else, with the beginning that its suffix suggests."""
    if path.suffix == ".safetensors":
        save_file({"w": torch.zeros(2)}, path, metadata={"format": "pt"})
    else:
        path.write_bytes(b'{"model_type": "vit"}')
    return path


def folder_at(path: Path) -> Path:
    path.mkdir()
    return path


# Ways in which the name of an output can be taken: (the folder of the inputs, the output) -> the path to give then.
TAKEN: dict[str, Callable[[Path, Path], Path]] = {
    "another file": lambda folder, path: other_file(path),
    "a folder": lambda folder, path: folder_at(path),
    "no folder": lambda folder, path: path.parent / "missing" / path.name,
    "its input": lambda folder, path: folder / "vit.safetensors",
    "the population": lambda folder, path: folder / "a.pop",
    "a shard": lambda folder, path: next((folder / "a.pop" / "shards").glob("*.h5")),
}


@pytest.mark.parametrize("way", TAKEN)
@pytest.mark.parametrize("command", ["covariance", "fit-init"])
def test_what_cannot_be_written_is_refused_before_anything_is(
    command: str,
    way: str,
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(folder)
    given, options = COMMANDS[command]
    paths = {name: tmp_path / f"out{i}{suffix}" for i, (name, suffix) in enumerate(options.items())}
    last = list(paths)[-1]
    paths[last] = TAKEN[way](folder, paths[last])
    before = contents(folder), contents(tmp_path)
    code, _, err = run(command, *given, *(str(each) for pair in paths.items() for each in pair), capsys=capsys)
    assert code in (1, 2, 3), err
    assert len(err.strip().splitlines()) == 1, err
    assert "internal error" not in err
    assert (contents(folder), contents(tmp_path)) == before


@pytest.mark.parametrize("command", COMMANDS)
def test_what_a_command_wrote_it_may_replace(
    command: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With all options, twice: the same files with the same bytes, and no other."""
    monkeypatch.chdir(folder)
    given, options = COMMANDS[command]
    before = contents(folder)
    paths = [part for name, suffix in options.items() for part in (name, tmp_path / f"out{len(name)}{suffix}")]
    written = []
    for _ in range(2):
        code, _, err = run(command, *given, *paths, capsys=capsys)
        assert code == 0, err
        written.append(contents(tmp_path))
    assert written[0] == written[1]
    assert {tmp_path / name for name in written[0]} >= set(paths[1::2])
    assert contents(folder) == before


@pytest.mark.parametrize("command", [["collect", "digits-convnext", "-n", "2"], ["demo", "--networks", "16"]])
@pytest.mark.parametrize("out", ["mine", "mine/notes.txt"])
def test_folders_of_others_are_left_alone(
    command: list[str], out: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/notes.txt").write_text("mine")
    before = contents(tmp_path)
    code, _, err = run(*command, "-o", out, "--workers", "1", capsys=capsys)
    assert code in (1, 2, 3)
    assert "internal error" not in err
    assert contents(tmp_path) == before
