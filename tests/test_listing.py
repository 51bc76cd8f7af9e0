"""The catalogue: everything in the registries, with parameters and sources."""

import inspect
import json
from pathlib import Path

import weightscope.init
from weightscope.cli import catalogue as listing
from weightscope.cli.catalogue import catalogue
from weightscope.data import task
from weightscope.data.registry import DATASETS
from weightscope.fits import STRUCTURES
from weightscope.recipe.networks import SECTIONS


def test_every_registered_name_is_listed_once() -> None:
    found = catalogue()
    names = [(entry.kind, entry.name) for entry in found.entries]
    assert len(set(names)) == len(names)
    by_kind = {kind: {name for k, name in names if k == kind} for kind in listing.KINDS}
    assert by_kind["networks"] == set(SECTIONS)
    assert by_kind["datasets"] == {*DATASETS, *task.SECTIONS} - {task.IMAGES}
    assert by_kind["structures"] == {*STRUCTURES, "filters", "conv_schedule", "identity_product"}
    functions = {name[:-1] for name in weightscope.init.__all__ if name.endswith("_")}
    assert by_kind["initialisers"] == functions
    folder = Path(__file__).parent.parent / "populations"
    assert [name for kind, name in names if kind == "recipes"] == sorted(path.stem for path in folder.glob("*.toml"))


def test_every_entry_is_described() -> None:
    for entry in catalogue().entries:
        assert entry.description.strip(), entry.name
        assert "\n" not in entry.description
        if entry.kind == "initialisers" and entry.name != "default":
            assert entry.source, entry.name


def test_parameters_are_those_of_the_function() -> None:
    entry = catalogue("initialisers")["mimetic_attention"]
    signature = inspect.signature(weightscope.init.mimetic_attention_).parameters
    expected = {n: p.default for n, p in signature.items() if n not in ("module", "generator")}
    assert entry.parameters == expected
    assert catalogue("initialisers")["transfer"].required == ("source",)
    assert catalogue("structures")["low_rank"].parameters == {"rank": 8}
    network = catalogue("networks")["vit"]
    assert network.required == ("width", "depth", "heads")
    assert network.parameters["pool"] == "average"
    assert network.signature.startswith("vit(width, depth, heads, patch_size=4")


def test_the_catalogue_is_a_result() -> None:
    found = catalogue("datasets")
    assert repr(found) == f"<Catalogue: {len(found.entries)} datasets>"
    assert "1 x 8 x 8 pixels, 1,437 training and 360 test images" in found.text()
    assert found["copy"].signature.startswith("copy(length, vocabulary, train=2000, test=100, held_out='test'")
    description = "Sequences. Repeat the string: a b c | a b c, tokens 0 to v - 2 uniform, then the separator v - 1."
    assert found["copy"].description == description
    assert set(found.to_pandas()["kind"]) == {"datasets"}
    json.dumps(catalogue().to_dict(), allow_nan=False)
    assert max(map(len, catalogue().text().splitlines())) <= 110
