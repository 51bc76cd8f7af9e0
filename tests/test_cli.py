"""The command line: every command documents itself, and every error is one line with the right exit code."""

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from programs import run

from weightscope.analysis.attention_products import products
from weightscope.analysis.inspection import inspect
from weightscope.checkpoint import Checkpoint
from weightscope.cli import cli, main
from weightscope.errors import DataError
from weightscope.networks import ViT
from weightscope.networks.sequences import Mamba
from weightscope.population import Population
from weightscope.recipe import Recipe
from weightscope.training.collection import collect

TINY = """
[network]
type = "convnext"
width = 4
depth = 1
kernel_size = 3
patch_size = 2
expansion = 2
[data]
name = "digits"
train = 64
test = 40
[training]
epochs = 1
batch_size = 16
[population]
networks = 12
tile = 6
"""


def succeed(*arguments: object, capsys: pytest.CaptureFixture[str]) -> str:
    """What a command prints that ends without an error."""
    code, out, err = run(*arguments, capsys=capsys)
    assert code == 0, err
    return out


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, trained_here: None) -> Path:
    """A recipe and a small population of it."""
    path = tmp_path_factory.mktemp("cli")
    (path / "tiny.toml").write_text(TINY)
    with pytest.raises(SystemExit) as stopped:
        main(["collect", str(path / "tiny.toml"), "-o", str(path / "tiny.pop"), "--workers", "1", "--device", "cpu"])
    assert not stopped.value.code
    return path


@pytest.fixture(scope="module")
def hub_vit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model folder of transformers."""
    import shims

    transformers, path = shims.transformers(), tmp_path_factory.mktemp("hub") / "vit"
    sizes = {"hidden_size": 12, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
    config = transformers.ViTConfig(**sizes, image_size=16, patch_size=4)
    transformers.ViTForImageClassification(config).save_pretrained(path)
    return path


@pytest.mark.parametrize("name", list(cli.commands))
def test_the_examples_of_help_are_valid_commands(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    examples = run(name, "--help", capsys=capsys)[1].partition("Example")[2].partition("\n\n")[0]
    commands = [shlex.split(part) for part in examples.replace("\\\n", " ").splitlines()[1:]]
    assert commands
    for program, command, *arguments in commands:
        assert (program, command) == ("weightscope", name)
        cli.commands[name].make_context(name, arguments)  # parses, and runs nothing


def test_every_option_has_help():
    silent = [
        f"{name} {option.opts[0]}"
        for name, command in cli.commands.items()
        for option in command.params
        if option.param_type_name == "option" and not option.help
    ]
    assert silent == []


# What is meant by numbers that look odd: last layers, first networks; it is run elsewhere.
MEANT = {"--network": {"0"}, "--shard": {"0"}, "--seed": {"0"}, "--price": {"0"}}
GAIN = ("tiny.pop", "--structure", "exchangeable", "--gain", "auto", "-o", "a.safetensors")
SETTINGS = {  # command or option -> what it needs to run
    "demo": ("-o", "demo"),
    "init": ("weightscope.networks:ViT", "--init", "mimetic_mlp", "-o", "a.pt"),
    "collect": ("tiny.toml", "-o", "a.pop"),
    "import": ("vit.pt", "-o", "a.pop"),
    "covariance": ("tiny.pop", "--part", "filters"),
    "products": ("vit.pt",),
    "audit": ("vit.pt", "--init", "mimetic_attention"),
    "attention-maps": ("vit",),
    "fit-init": ("tiny.pop", "--structure", "diagonal", "-o", "a.safetensors"),
    "bench": ("tiny.toml", "-o", "bench", "--init", "xavier"),
    "--gain-seeds": GAIN,
    "--gain-epochs": GAIN,
}
NUMERIC = [
    (name, option.opts[-1], value)
    for name, command in cli.commands.items()
    for option in command.params
    if getattr(option.type, "name", "") in ("integer", "integer range", "float", "float range", "number|auto")
    for value in [next(odd for odd in ("0", "-1", "nan") if odd not in MEANT.get(option.opts[-1], ()))]
]
TEXTS = (("covariance", "--at"), ("fit-init", "--gain"))  # numbers or words
SETTINGS["--gain"] = (*GAIN[:3], "-o", "a.safetensors")
NUMERIC += [(name, option, value) for name, option in TEXTS for value in ("\u00b2", "--3")]


@pytest.mark.parametrize(("name", "option", "value"), NUMERIC)
def test_absurd_numbers_are_one_line_and_write_nothing(
    name, option, value, folder, tmp_path, monkeypatch, capsys, request
):
    monkeypatch.chdir(tmp_path)
    if name == "attention-maps":
        (tmp_path / "vit").symlink_to(request.getfixturevalue("hub_vit"))
    for file in ("tiny.pop", "tiny.toml"):
        (tmp_path / file).symlink_to(folder / file)
    torch.save(ViT(8, 4, 12, 1, 2, 3).state_dict(), tmp_path / "vit.pt")
    before = sorted(tmp_path.rglob("*"))
    arguments = SETTINGS.get(option, SETTINGS.get(name, ("tiny.pop",)))
    extra = ("--plan",) if option == "--price" else ("-o", "a.h5") if name == "export" else ()
    code, _, err = run(name, *arguments, *extra, f"{option}={value}", capsys=capsys)
    assert code in (2, 3), err
    *others, said = err.splitlines()  # others: the progress of transformers' reading
    assert said.startswith("weightscope")
    assert "internal error" not in said
    assert not any("weightscope" in line for line in others)
    assert sorted(tmp_path.rglob("*")) == before


def test_help_and_version_load_nothing_heavy():
    code = "import sys; sys.argv = ['weightscope', '--help']\ntry:\n import weightscope.cli; weightscope.cli.main()\n"
    code += "except SystemExit: print([m for m in ('torch', 'h5py', 'matplotlib', 'numpy') if m in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip().endswith("[]")


@pytest.mark.slow
def test_a_population_is_drawn_and_exported(folder, capsys):
    """The rest of the chain from recipe to benchmark is run as the README's."""
    figure, table = folder / "c.png", folder / "c.json"
    arguments = ("-o", figure, "--json", table)
    assert "column means" in succeed("covariance", folder / "tiny.pop", *arguments, capsys=capsys)
    assert figure.read_bytes()[:4] == b"\x89PNG"
    assert json.loads(table.read_text())["n"] == 12
    succeed("export", folder / "tiny.pop", "-o", folder / "one.h5", "--select", "stem*", capsys=capsys)
    out = succeed("inspect", folder / "one.h5", "--json", folder / "one.json", capsys=capsys)
    assert "12 networks of" in out
    assert "stem.0.weight" in out
    assert "stages" not in out.partition("[network]")[0]
    assert json.loads((folder / "one.json").read_text())["recipe"]["population"]["networks"] == 12
    code, _, err = run("export", folder / "tiny.pop", "-o", folder / "one.npy", capsys=capsys)
    assert (code, ".h5" in err) == (2, True)


@pytest.mark.parametrize("command", ["inspect", "covariance", "list"])
def test_json_on_standard_output(folder, command, capsys, monkeypatch):
    """It alone; what is printed otherwise goes to standard error."""
    monkeypatch.chdir(folder)
    arguments = ("list", "recipes") if command == "list" else (command, "tiny.pop")
    code, out, err = run(*arguments, "--json", "-", capsys=capsys)
    assert code == 0
    assert json.loads(out)
    assert err
    assert not (folder / "-").exists()


def test_covariance_takes_a_part_that_the_model_has(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save(ViT(16, 4, 16, 1, 2, 10).state_dict(), "vit.pt")
    succeed("covariance", "vit.pt", "--json", "found.json", capsys=capsys)
    assert json.loads(Path("found.json").read_text())["part"] == "mlp-rows"


def complete(*words: str) -> list[str]:
    environment = {**os.environ, "_WEIGHTSCOPE_COMPLETE": "bash_complete", "COMP_CWORD": str(len(words))}
    environment["COMP_WORDS"] = " ".join(["weightscope", *words])
    command = [sys.executable, "-X", "importtime", "-m", "weightscope"]
    found = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=60)
    assert "| torch\n" not in found.stderr, "seconds for each key press"
    return found.stdout.split()


def test_the_shell_completes_names_and_paths():
    from weightscope.cli.options import NAMES
    from weightscope.fits import STRUCTURES
    from weightscope.fits.one_network import NETWORK_FITS
    from weightscope.init import INITIALISERS

    assert complete("bench", "x.toml", "--init", "mimetic_at") == ["plain,mimetic_attention"]
    assert complete("bench", "x.toml", "--init", "default+box") == ["plain,default+box_filters"]
    assert complete("fit-init", "x.pop", "--structure", "diag") == ["plain,diagonal"]
    assert complete("inspect", "dig") == ["file,dig"]
    assert complete("attention-maps", "m.pop", "--images", "cifar10") == ["plain,cifar10", "plain,cifar100"]
    assert complete("attention-maps", "m.pop", "--tokens", "copy") == ["plain,copy:", "plain,copy_reversed:"]
    assert complete("collect", "digits-convn") == ["plain,digits-convnext"]
    assert NAMES["initialisers"]() == sorted(INITIALISERS)
    assert set(NAMES["structures"]()) == {"auto", *STRUCTURES, *NETWORK_FITS}


@pytest.mark.slow
def test_audit_without_a_name_describes_and_exits_with_0(tmp_path, capsys):
    torch.save({n: torch.randn_like(v) for n, v in ViT(16, 4, 24, 1, 2, 3).state_dict().items()}, tmp_path / "m.pt")
    assert "mimetic_attention: no, " in succeed("audit", tmp_path / "m.pt", "--num-heads", "2", capsys=capsys)
    assert "no attribute or config with the number of heads" in succeed("audit", tmp_path / "m.pt", capsys=capsys)


# A command line, its exit code and what the line of the error says; TINY and TOML are a population and its recipe.
WRONG = [
    (("bench", "TINY", "--init", "mimetic_atention"), 2, "did you mean 'mimetic_attention'"),
    (("bench", "TINY"), 2, "--init: expected at least one initialiser"),
    (("bench", "TINY", "--init", "default", "--probe", "--plan"), 2, "--plan cannot be combined with --probe"),
    (("bench", "TINY", "--init", "default", "--probe", "--workers", "2"), 2, "--workers cannot be combined with"),
    (("collect", "TOML", "-o", "x.pop", "--device", "cudaa"), 2, "no device 'cudaa'; expected auto, cpu or cuda"),
    (("collect", "BAD", "-o", "x.pop"), 2, "training.lr: unknown key"),
    (("collect", "TOML", "-o", "x.pop", "--set", "training.epoch=2"), 2, "training.epoch: unknown key"),
    (("bench", "TOML", "--init", "default", "--set", "training.epochs=0"), 2, "training.epochs: "),
    (
        ("fit-init", "v.pt", "--structure=identity_product", "--option=config={}", "--heads=2", "-o", "x.safetensors"),
        2,
        "--option config=: expected it or --heads, --layout and --code, found both",
    ),
    (("collect", "TOML", "-o", "x.pop", "--plan", "--shard", "3"), 2, "--shard cannot be combined with --plan"),
    (("covariance", "TINY", "--select", "*.mlp.fc3.weight"), 2, "no tensor matches '*.mlp.fc3.weight'; there are"),
    (("covariance", "TINY", "--computed", "qk-diagona"), 2, "no computed coordinate 'qk-diagona'; did you mean 'qk-d"),
    (("covariance", "TINY", "--selct", "x"), 2, "--select"),  # click 8.1 has no quotes
    (("covariance", "TINY", "-o", "figure.gif"), 2, "png"),
    (("covariance", "TINY", "--exchangeable", "--eigenpairs", "3"), 2, "--eigenpairs: does not apply with --exch"),
    (("covariance", "a.pt", "b.pt", "--kind", "correlation"), 2, "--kind: does not apply within networks"),
    (("covariance", "a.pt", "--picture", "map"), 2, "'maps', 'depth', 'samples'"),
    (("fit-init", "TINY", "-o", "x.safetensors", "--gain", "3"), 2, "--gain requires --structure exchangeable"),
    (("fit-init", "TINY", "-o", "x.safetensors", "--gain", "nan"), 2, "--gain: expected a number >= 0 or auto, found"),
    (("fit-init", "TINY", "-o", "x.safetensors", "--gain-seeds", "3"), 2, "--gain-seeds requires --gain auto"),
    (("fit-init", "vit", "-o", "folder.safetensors"), 2, "found a folder"),
    (("fit-init", "none.pop", "-o", "/proc/x.safetensors"), 1, "cannot write /proc/x"),
    (("audit", "vit.pt", "--init", "mimetic_mlp(b=3"), 2, "expected NAME or NAME(NUMBER=VALUE, ...)"),
    (("inspect", "none.pop"), 3, "none.pop"),
    (("products", "vit", "-o", "no/such.png"), 2, "its folder no does not exist"),
    (("collcet",), 2, "no command 'collcet'; did you mean 'collect'?"),
]


def test_set_changes_a_field_of_the_recipe(folder, tmp_path, capsys):
    given = ("--set", "training.epochs=2", "--set", "data.train=32", "-n", 1, "--workers", 1, "--device", "cpu")
    succeed("collect", folder / "tiny.toml", "-o", tmp_path / "set.pop", *given, capsys=capsys)
    found = Recipe.load(folder / "tiny.toml").differences(Population(tmp_path / "set.pop").recipe)
    assert [line for line in found if not line.startswith(("population.", "training.kernels", "training.device"))] == [
        "data.train: 64 -> 32",
        "training.epochs: 1 -> 2",
    ]


@pytest.mark.parametrize(("arguments", "code", "message"), WRONG, ids=lambda value: None)
def test_wrong_arguments_are_one_short_line_before_anything_is_read_or_written(
    folder, arguments, code, message, tmp_path, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder.safetensors").mkdir()
    if arguments[0] == "audit":
        torch.save(ViT(16, 4, 96, 2, 3, 10).state_dict(), "vit.pt")
    (tmp_path / "bad.toml").write_text(TINY.replace("epochs = 1", "epochs = 1\nlr = 3"))
    there = sorted(tmp_path.rglob("*"))
    names = {"TINY": str(folder / "tiny.pop"), "TOML": str(folder / "tiny.toml"), "BAD": "bad.toml"}
    found, out, err = run(*(names.get(a, a) for a in arguments), capsys=capsys)
    assert (found, out, err.count("\n")) == (code, "", 1), err
    assert message in err
    assert len(err) < 250 + len(names["TINY"])
    assert "?;" not in err
    assert sorted(tmp_path.rglob("*")) == there


def test_bench_names_its_folder_after_the_recipe(folder, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    arguments = ("--init", "default", "--seeds", 2, "--workers", 1, "--device", "cpu")
    code, out, err = run("bench", folder / "tiny.toml", *arguments, capsys=capsys)
    assert code == 0, err
    assert (tmp_path / "tiny-bench" / "results.json").exists()
    assert "wrote tiny-bench/results.json, tiny-bench/table.md, tiny-bench/convergence.png" in out


def test_debug_shows_the_traceback(folder):
    with pytest.raises(DataError):
        main(["--debug", "covariance", str(folder / "none.pop")])


@pytest.mark.slow
def test_a_population_that_is_not_complete_is_used_if_asked(folder, tmp_path, capsys):
    path = tmp_path / "half.pop"
    shutil.copytree(folder / "tiny.pop", path)
    (path / "shards/00001.h5").unlink()
    for command in (
        ("covariance", path, "-o", tmp_path / "c.png"),
        ("covariance", path, "--exchangeable", "-o", tmp_path / "e.png"),
        ("covariance", path, "--part", "filters", "--init", "default", "-o", tmp_path / "f.png"),
        ("fit-init", path, "-o", tmp_path / "i.safetensors", "--structure", "diagonal", "--holdout", "0.4"),
        ("export", path, "-o", tmp_path / "e.h5"),
    ):
        code, _, err = run(*command, capsys=capsys)
        assert code == 3, command
        assert "expected 12 networks, found 6" in err
        assert "--partial" in err
        code, out, err = run(*command, "--partial", capsys=capsys)
        assert (code, err) == (0, ""), command
        assert "wrote" in out
    (path / "shards/00000.h5").unlink()
    code, _, err = run("covariance", path, "-o", tmp_path / "c.png", "--partial", capsys=capsys)
    assert code == 2
    assert "found 0 of 12, counted from 0; run `weightscope collect` again" in err
    code, _, err = run("fit-init", path, "-o", tmp_path / "i.safetensors", "--partial", capsys=capsys)
    assert code == 3
    assert "too few networks to compare structures: 0 usable" in err
    code, _, err = run("fit-init", tmp_path / "no.pth", "-o", tmp_path / "i.safetensors", "--partial", capsys=capsys)
    assert code == 2
    assert "--partial: does not apply to one network" in err


@pytest.fixture(scope="module")
def vits(tmp_path_factory: pytest.TempPathFactory, trained_here: None) -> Path:
    """A population of two small vision transformers, the second with the mimetic start."""
    recipe = {
        "network": {"type": "vit", "width": 16, "depth": 2, "heads": 2, "patch_size": 2},
        "data": {"name": "digits", "train": 32, "test": 16},
        "training": {"epochs": 1, "batch_size": 32, "learning_rate": 0.0, "weight_decay": 0.0, "kernels": "torch"},
        "init": [{"name": "default"}, {"name": "mimetic_attention"}],
        "population": {"networks": 2, "tile": 2},
    }
    path = tmp_path_factory.mktemp("vits") / "vits.pop"
    collect(Recipe.parse(recipe), path, workers=1, device="cpu", progress=False)
    return path


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("inspect",), "tensors, "),
        (("covariance", "-o", "out.png"), "fc1"),
        (("fit-init", "--structure", "identity-product", "-o", "out.safetensors"), "alpha"),
    ],
)
def test_a_network_of_a_population_is_a_source(vits, tmp_path, arguments, expected, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    command, *options = arguments
    code, out, err = run(command, f"{vits}::1", *options, capsys=capsys)
    assert code == 0, err
    assert expected in out
    code, _, err = run(command, f"{vits}::2", *options, capsys=capsys)
    assert code == 2
    assert "2" in err
    assert err.count("\n") == 1


def test_a_key_chooses_the_weights_of_every_command(vits, tmp_path, capsys, monkeypatch):
    """And a warning, also in JSON and from workers, names weights beside those that were read."""
    monkeypatch.chdir(tmp_path)
    first, second = (Population(vits).network(k).state_dict() for k in (0, 1))
    torch.save({"student": first, "teacher": second}, "dino.pth")
    for command in ("inspect", "verify", "covariance"):
        code, _, err = run(command, "dino.pth", capsys=capsys)
        assert code == 3
        assert "choose one with --key (key= in Python): 'student', 'teacher'" in err
        code, _, err = run(command, "dino.pth", "--key", "teacher", capsys=capsys)
        assert code == 0, err
    run("products", "dino.pth", "--key", "teacher", "--num-heads", "2", "--json", "p.json", capsys=capsys)
    betas = [row["beta"] for row in json.loads(Path("p.json").read_text())["rows"]]
    assert betas == [row["beta"] for row in products(second, config={"num_heads": 2}).rows()]
    arguments = ("--structure", "identity_product", "--num-heads", "2", "-o", "fit.safetensors", "--json", "fit.json")
    run("fit-init", "dino.pth", "--key", "teacher", *arguments, capsys=capsys)
    assert json.loads(Path("fit.json").read_text())["provenance"]["key"] == "teacher"
    bad = ("fit-init", "dino.pth", "--structure", "identity_product", "-o", "x.safetensors", "--option", "config={x}")
    for wrong in (("products", f"{vits}::1"), bad):
        assert run(*wrong, "--key", "teacher", capsys=capsys)[0] == 2
    assert run("audit", "dino.pth", "--key", "teacher", "--init", "mimetic_mlp", capsys=capsys)[0] == 1
    mamba = Mamba(10, 8, 1).state_dict()
    torch.save({"student": mamba, "teacher": mamba}, "mamba.pth")
    maps = ("attention-maps", "mamba.pth", "--key", "teacher")
    assert run(*maps, "--tokens", "copy:4", capsys=capsys)[0] == 0
    assert "expected Mamba with --tokens" in run(*maps, capsys=capsys)[2]
    torch.save({"model": first, "model_ema": second}, "ema.pth")
    for workers, files in ((1, ["ema.pth"]), (2, ["ema.pth", f"{vits}::0"])):
        arguments = ("--num-heads", 2, "--workers", workers, "--json", "p.json")
        _, _, err = run("products", *files, *arguments, capsys=capsys)
        assert "ema.pth: read `model`; `model_ema` is beside it: --key model_ema" in err
        assert json.loads(Path("p.json").read_text())["warnings"] == err.splitlines()


def test_what_is_found_in_a_network_of_a_population_is_found_in_the_module(vits, tmp_path, capsys):
    """And not in its neighbour, nor by other parameters; an audit answers with its exit code."""
    module = Population(vits).network(1)
    assert products(f"{vits}::1").rows() == [{**row, "source": "vits.pop::1"} for row in products(module).rows()]
    assert inspect(f"{vits}::1").tensors == inspect(Checkpoint(module)).tensors
    language, file = tmp_path / "language.toml", tmp_path / "audit.json"
    language.write_text('name = "mimetic_attention"\npreset = "language"\n')
    for number, init in ((0, "mimetic_attention"), (1, "mimetic_attention"), (1, language)):
        code, out, _ = run("audit", f"{vits}::{number}", "--init", init, "--json", file, capsys=capsys)
        right = (number, init) == (1, "mimetic_attention")
        assert (code == 0, "FAILED" not in out, json.loads(file.read_text())["passed"]) == (right,) * 3
