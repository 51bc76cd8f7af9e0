"""Recipes: strict, with the field's path in every error; they survive the round trip through plain data."""

from pathlib import Path

import pytest
import tomli_w

from weightscope.errors import RecipeError
from weightscope.recipe import InitConfig, Range, Recipe

GOOD = """
[network]
type = "convnext"
width = 16
depth = 4
[data]
name = "digits"
[training]
epochs = 3
learning_rate = { low = 1e-3, high = 1e-1 }
weight_decay = [0.0, 0.1]
[[init]]
name = "default"
[[init]]
name = "mimetic_mlp"
b = 0.1
[population]
networks = 8
"""


def test_a_recipe_survives_the_round_trip() -> None:
    recipe = Recipe.parse(GOOD)
    assert Recipe.parse(recipe.to_dict()) == recipe
    assert recipe.training.learning_rate == Range(low=1e-3, high=1e-1)
    assert recipe.init[1].parameters == {"b": 0.1}


NETWORK = "[network]\ntype = 'convnext'\nwidth = 16\ndepth = 4"
DATA, TRAINING = "[data]\nname = 'digits'", "[training]\nepochs = 1"
WRONG = [
    ("[training]\nepochs = -1", "training.epochs: input should be greater than or equal to 1, found -1"),
    ("[training]\nepochs = 1\nlearning_rate = nan", "training.learning_rate: expected a finite number >= 0"),
    ("[training]\nepochs = 1\nlearning_rate = {low = 2.0, high = 1.0}", "low must not exceed high"),
    ("[training]\nepoch = 1", "training.epoch: unknown key, did you mean 'epochs'"),
    ("[training]\nepochs = 1\nengine = 'jit'", "training.engine: input should be 'batched' or 'loop'"),
    ("[training]\nepochs = 1\nengine = 'loop'\nkernels = 'compiled'", "engine 'loop' runs plain PyTorch"),
    ("[data]\nname = 'digit'", "data.name: no data set 'digit'; did you mean 'digits'[^,]*$"),
    ("[data]\nname = 'copyy'\nlength = 4", "'copy'.*'package.module:name'[^;]*$"),
    ("[population]\nlr = 0", "population.lr: unknown key, there are networks, seed, tile"),
    ("[init]\nname = 'default'\nb = inf", "init.0: b must be finite"),
    ("[populations]", "populations: unknown key, did you mean 'population'"),
    ("[training", "not TOML"),
    ("[network]\ntype = 'resnet'", "network: no network type 'resnet'; there are convmixer, .*package.module:factory"),
    ("[network]\nwidth = 3", "network: type is missing; expected one of 'convmixer'"),
    ("[network]\ntype = 'my_nets:Net'\nwidths = [1, nan]", r"network: widths\[1\] must be finite"),
    (f"{NETWORK}\npatch_size = 3", "must divide digits's 8 pixels"),
    (
        "[network]\ntype = 'convnext'\nwidth = [8, 16]\ndepth = [1, 1]\npatch_size = 8",
        "reduces the image by a factor of 16",
    ),
    ("[network]\ntype = 'convnext'\nwidth = [8, 16]\ndepth = 4", "one entry per stage"),
    ("[network]\ntype = 'vit'\nwidth = 10\ndepth = 1\nheads = 3", "heads must divide width"),
    ("[network]\ntype = 'convmixer'\nwidth = 4\ndepth = 2\nheads = 1", "network.heads: unknown key"),
    ("[network]\ntype = 'convnext'\nwidth = 100000000\ndepth = 1", "network.width: .* 65536, found 100000000"),
]


@pytest.mark.parametrize(("section", "message"), WRONG)
def test_errors_name_the_path_and_what_is_allowed(section: str, message: str) -> None:
    """One section replaces or joins those of a sound recipe; the answer is short."""
    others = [text for text in (NETWORK, DATA, TRAINING) if text.partition("\n")[0] not in section]
    with pytest.raises(RecipeError, match=message) as caught:
        Recipe.parse("\n".join([*others, section]))
    assert len(str(caught.value)) < 200
    assert "?;" not in str(caught.value)


def test_a_byte_order_mark_is_skipped(tmp_path: Path) -> None:
    (tmp_path / "bom.toml").write_bytes(b"\xef\xbb\xbf" + GOOD.encode())
    assert Recipe.load(tmp_path / "bom.toml") == Recipe.parse(GOOD)


def test_what_is_no_file_of_this_kind_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("bench").mkdir()
    Path("latin.toml").write_bytes(b"# \xff\n")
    Path("a.toml").write_text('[network]\ntype = "vit"\n[data]\nname = "digits"\n')
    for load, name, message in (
        (Recipe.load, "none.toml", "cannot read"),
        (Recipe.load, "latin.toml", r"cannot read .*: expected a TOML file in UTF-8"),
        (Recipe.load, "bench", r"bench: expected a \.toml file, .* found another folder"),
        (InitConfig.load, "a.toml", r"the keys of an \[init\] table, with `name` .*, found network, data"),
    ):
        with pytest.raises(RecipeError, match=message):
            load(name)


def test_differences_show_both_values() -> None:
    recipe = Recipe.parse(GOOD)
    other = recipe.replace({"training.epochs": 4, "population.networks": 16})
    assert recipe.differences(other) == ["population.networks: 8 -> 16", "training.epochs: 3 -> 4"]
    assert recipe.differences(recipe) == []


OWN = """
[network]
type = "not_yet.written:network"
widths = [4, 8]
gain = 0.5
[data]
name = "not_yet.written:images"
[init]
name = "not_yet.written:initialiser"
alpha = 2
[training]
epochs = 3
engine = "loop"
"""


@pytest.mark.parametrize(
    ("path", "whole"), [("init.name", "init"), ("training.learning_rate.low.a", "training.learning_rate.low")]
)
def test_replacing_below_what_is_no_table_is_an_error(path: str, whole: str) -> None:
    with pytest.raises(RecipeError, match=f"{path}: expected a table at `{whole}`, found "):
        Recipe.parse(GOOD).replace({path: 1})


def test_references_are_parsed_without_importing_them() -> None:
    recipe = Recipe.parse(OWN)
    assert recipe.network.numbers == {"widths": [4, 8], "gain": 0.5}
    assert recipe.init[0].parameters == {"alpha": 2}
    assert Recipe.parse(recipe.to_dict()) == recipe
    assert Recipe.parse(tomli_w.dumps(recipe.to_dict())) == recipe


def my_function() -> None:
    """Stands for a network factory, a data set and an initialiser."""


def test_callables_become_references() -> None:
    here = f"{__name__}:my_function"
    recipe = Recipe.parse(
        {"network": {"type": my_function, "width": 3}, "data": my_function, "training": {"epochs": 1}}
    )
    assert (recipe.network.type, recipe.network.numbers, recipe.data.name) == (here, {"width": 3}, here)
    other = recipe.replace({"init": [my_function, {"name": my_function, "a": 1}], "network": my_function})
    assert [init.name for init in other.init] == [here, here]
    assert other.init[1].parameters == {"a": 1}
    assert other.network.numbers == {}
    assert recipe.replace({"init": lambda module, *, generator: module}).init[0].name.startswith(f"{__name__}:lambda_")
