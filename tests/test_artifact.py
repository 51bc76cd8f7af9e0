import contextlib
from pathlib import Path

import numpy as np
import pytest
import torch
from programs import rewritten
from safetensors.numpy import save_file
from torch import nn

from weightscope._util.plugins import source_hash
from weightscope.errors import DataError, SpecError, UsageError
from weightscope.fits import STRUCTURES, load_artifact
from weightscope.fits.fitting import fit
from weightscope.init.from_artifact import PopulationInit, load_init
from weightscope.spec import TensorSpec, WeightSpec
from weightscope.statistics.samples import WeightArray


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, groups=4)
        self.fc1 = nn.Linear(4, 6)
        self.norm = nn.BatchNorm1d(6)
        self.fc2 = nn.Linear(6, 4)
        self.mix1 = nn.Linear(3, 4, bias=False)
        self.mix2 = nn.Linear(3, 4, bias=False)


SPEC = WeightSpec.of(Network())
SELECTIONS = ("*", "fc?.weight,conv.weight", "mix?.weight")  # a structure is fitted to the first that it is for
# Renumbering hidden units, and the four channels with a flip of their sign for the sake of generality.
AXES = {
    "conv.weight": ("channels", None, None, None),
    "conv.bias": ("channels",),
    "fc1.weight": ("hidden", "channels"),
    "fc2.weight": ("~channels", "hidden"),
    "fc2.bias": ("~channels",),
    "mix1.weight": ("~channels", None),
    "mix2.weight": ("~channels", None),
} | {name: ("hidden",) for name in SPEC.names if name.startswith("norm") or name == "fc1.bias"}


def population(size=60):
    rng = np.random.default_rng(0)
    mixing = rng.standard_normal((SPEC.size, SPEC.size)) / np.sqrt(SPEC.size)
    return rng.standard_normal((size, SPEC.size)) @ mixing + np.linspace(-1, 1, SPEC.size)


def fitted(structure="dense", select="fc?.weight", joint="all", weights=None):
    source = WeightArray(population() if weights is None else weights, SPEC)
    permutations = AXES if structure == "exchangeable" else None
    return fit(source, select, structure=structure, joint=joint, permutations=permutations)


def frozen():
    """Fixed tensors, partly fixed ones, and varying ones, in three groups."""
    weights = population()
    weights[:, SPEC.slices["conv.weight"]] = np.linspace(0, 1, 36)
    weights[:, SPEC.slices["fc1.weight"].start : SPEC.slices["fc1.weight"].start + 3] = 0.5
    return fitted("dense", "conv.weight,fc?.weight", "tensor", weights)


ARTIFACTS = [*STRUCTURES, "frozen"]


def make(structure):
    if structure == "frozen":
        return frozen()
    for select in SELECTIONS:
        with contextlib.suppress(DataError):
            return fitted(structure, select)
    raise AssertionError(f"{structure} cannot be fitted to any of {SELECTIONS}")


@pytest.fixture
def path(tmp_path):
    return fitted().save(tmp_path / "mlp.safetensors")


@pytest.mark.parametrize("structure", ARTIFACTS)
def test_round_trip_is_bit_exact(tmp_path, structure):
    result = make(structure)
    again = load_artifact(result.save(tmp_path / "a.safetensors"))
    assert again.to_dict() == result.to_dict()
    assert again.text() == result.text()
    np.testing.assert_array_equal(again.sample(np.random.default_rng(1), 4), result.sample(np.random.default_rng(1), 4))
    x = population(5)[:, SPEC.columns(result.spec)]
    for ours, theirs in zip(result.groups, again.groups, strict=True):
        if ours.structure is not None and ours.varying is None:
            columns = result.spec.columns(ours.spec)
            np.testing.assert_array_equal(
                ours.structure.log_prob(x[:, columns]), theirs.structure.log_prob(x[:, columns])
            )
            with pytest.raises(ValueError, match="read-only"):
                theirs.structure.mean[0] = 1.0
    raw = (tmp_path / "a.safetensors").read_bytes()
    assert again.save(tmp_path / "b.safetensors").read_bytes() == raw
    assert int.from_bytes(raw[:8], "little") % 8 == 0  # the arrays begin at a multiple of 8


@pytest.mark.parametrize("structure", ARTIFACTS)
def test_load_init_draws_what_the_structures_make_of_the_generators_noise(tmp_path, structure):
    result = make(structure)
    init = load_init(result.save(tmp_path / "a.safetensors"))
    module = init(Network().double(), generator=torch.Generator().manual_seed(0))
    generator, state = torch.Generator().manual_seed(0), module.state_dict()
    for group in result.groups:
        drawn = group.draw(lambda shape: torch.randn(shape, generator=generator, dtype=torch.float64).numpy(), 1)
        for name, wanted in group.spec.unpack(drawn[0]).items():
            np.testing.assert_array_equal(state[name].numpy(), wanted)


def test_only_selected_tensors_change_and_the_report_says_so(path):
    module = Network()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    init = load_init(path)
    assert init.report is None
    assert init(module, generator=torch.Generator().manual_seed(0)) is module
    changed = [name for name, value in module.state_dict().items() if not torch.equal(value, before[name])]
    assert changed == ["fc1.weight", "fc2.weight"] == list(init.report.touched)
    assert set(init.report.untouched) == {n for n, _ in module.named_parameters()} - set(changed)
    assert str(init.report).startswith("set 2 tensors: `fc1.weight`, `fc2.weight`; left alone 8 tensors: `conv.weight`")
    assert "dense" in repr(init)


def test_a_generator_decides_every_number(path):
    init = load_init(path)
    first, again, other = (init(Network(), generator=torch.Generator().manual_seed(s)).fc1.weight for s in (1, 1, 2))
    unsaved = PopulationInit(load_artifact(path))(Network(), generator=torch.Generator().manual_seed(1)).fc1.weight
    assert torch.equal(first, again)
    assert torch.equal(first, unsaved)
    assert not torch.equal(first, other)
    loose = []
    for _ in range(2):
        module = Network()
        torch.manual_seed(5)
        loose.append(init(module).fc1.weight)
    assert torch.equal(*loose)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_each_dtype_is_the_rounded_float64(path, dtype):
    init = load_init(path)
    exact = init(Network().double(), generator=torch.Generator().manual_seed(0)).fc2.weight
    found = init(Network().to(dtype), generator=torch.Generator().manual_seed(0)).fc2.weight
    assert found.dtype == dtype
    assert torch.equal(found, exact.to(dtype))


def test_wrappers_frozen_parameters_and_layouts(path):
    init = load_init(path)
    expected = init(Network(), generator=torch.Generator().manual_seed(0)).fc1.weight
    wrapped = nn.Module()
    wrapped.module = nn.Module()
    wrapped.module._orig_mod = Network()
    inner = wrapped.module._orig_mod
    inner.fc1.weight.requires_grad_(False)
    inner.fc1.weight.data = inner.fc1.weight.data.T.contiguous().T
    init(wrapped, generator=torch.Generator().manual_seed(0))
    assert torch.equal(inner.fc1.weight, expected)
    assert not inner.fc1.weight.requires_grad
    assert "conv.weight" in init.report.untouched


def test_buffers_of_a_population_are_set(tmp_path):
    init = load_init(fitted("diagonal", "norm.*").save(tmp_path / "a.safetensors"))
    module = init(Network(), generator=torch.Generator().manual_seed(0))
    assert not torch.equal(module.norm.running_mean, torch.zeros(6))
    assert "norm.running_var" in init.report.touched


def test_another_network_is_refused_and_left_alone(path):
    class Other(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc1 = nn.Linear(4, 7)

    module, init = Other(), load_init(path)
    before = module.fc1.weight.clone()
    with pytest.raises(
        SpecError, match=r"another network: `fc1.weight` expected \(6, 4\), found \(7, 4\); `fc2.weight` is missing"
    ):
        init(module)
    assert torch.equal(module.fc1.weight, before)
    with pytest.raises(SpecError, match="another network"):
        init(module, strict=False)  # nothing fits at all
    half = Network()
    del half.fc1
    init(half, strict=False)
    assert (init.report.touched, init.report.absent) == (("fc2.weight",), ("fc1.weight",))
    assert "not in the module 1 tensors: `fc1.weight`" in str(init.report)
    with pytest.raises(DataError, match="meta device"):
        init(Network().to("meta"))
    with pytest.raises(UsageError, match="load_init: expected a module, found OrderedDict"):
        init(Network().state_dict())
    with pytest.raises(UsageError, match="expected a torch"):
        init(Network(), generator="0")


def test_an_artifact_of_a_newer_version(path):
    rewritten(path, lambda header: header | {"version": 3})
    with pytest.raises(DataError, match="version 3 of weightscope-initialiser is not known; use a newer"):
        load_artifact(path)


def in_group(**values):
    return lambda header: header | {"groups": [header["groups"][0] | values, *header["groups"][1:]]}


def test_files_that_are_no_artifacts(tmp_path, path):
    with pytest.raises(DataError, match="found no file"):
        load_artifact(tmp_path / "missing.safetensors")
    save_file({"weight": np.ones(3)}, tmp_path / "plain.safetensors")
    with pytest.raises(DataError, match="a safetensors file without its header"):
        load_init(tmp_path / "plain.safetensors")
    whole = path.read_bytes()
    for name, data in {"truncated": whole[:-8], "text": b"not a safetensors file at all"}.items():
        (tmp_path / name).write_bytes(data)
        with pytest.raises(DataError, match="an invalid safetensors file"):
            load_artifact(tmp_path / name)
    with pytest.raises(DataError, match="artifact"):
        load_artifact(tmp_path)


def test_groups_keep_the_specs_order():
    # A block's tensors need not be neighbours in the network.
    spec = WeightSpec([TensorSpec(n, (2,)) for n in ("a.x.weight", "b.x.weight", "a.y.weight")])
    data = np.random.default_rng(0).normal([0, 0, 10, 10, 20, 20], size=(30, 6))
    result = fit(WeightArray(data, spec), "*", structure="diagonal", joint="block")
    assert [g.spec.names for g in result.groups] == [("a.x.weight", "a.y.weight"), ("b.x.weight",)]
    np.testing.assert_allclose(
        result.sample(np.random.default_rng(0), 500).mean(axis=0), [0, 0, 10, 10, 20, 20], atol=0.5
    )


STORED = Path(__file__).with_name("stored")


@pytest.mark.parametrize("structure", ["conv_schedule", "identity_product", "isotropic"])
def test_stored_artifacts_stay_readable_and_are_written_byte_for_byte(tmp_path, structure):
    path = STORED / f"{structure}.safetensors"
    found = load_artifact(path)
    assert (found.groups[0].label if structure == "isotropic" else found.structure) == structure
    assert found.save(tmp_path / "again.safetensors").read_bytes() == path.read_bytes()


def test_the_first_version_stays_readable():
    old, new = (load_artifact(STORED / f"isotropic{version}.safetensors") for version in ("-1", ""))
    assert old.to_dict() == new.to_dict()
    np.testing.assert_array_equal(old.groups[0].structure.variance, new.groups[0].structure.variance)


FOREIGN = """
from pathlib import Path
Path(__file__).with_name("imported").touch()
from weightscope.fits import Diagonal

class Mine(Diagonal):
    pass
"""


def test_a_file_cannot_have_anything_imported(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "foreign_structure.py").write_text(FOREIGN)
    reference = "foreign_structure:Mine"
    path = fitted("diagonal").save(tmp_path / "a.safetensors")
    rewritten(path, in_group(structure=reference, source_hash="0" * 16))
    for load in (load_artifact, load_init):
        with pytest.raises(UsageError, match="this would run foreign_structure:Mine; read it, then add --trust"):
            load(path)
    assert not (tmp_path / "imported").exists()
    with pytest.raises(DataError, match=r"source changed since the fit \(hash 0{16}, now [0-9a-f]{16}\)"):
        load_artifact(path, trust=True)
    assert (tmp_path / "imported").exists()
    rewritten(path, in_group(structure=reference, source_hash=source_hash(reference)))
    init = load_init(path, trust=True)
    assert type(init.result.groups[0].structure).__module__ == "foreign_structure"
