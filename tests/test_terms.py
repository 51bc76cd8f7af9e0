"""`fit-init --explain`: planted terms are found with their size, others are not, and the code draws what it states."""

import re

import numpy as np
import pytest
import torch
from programs import run

from weightscope import init as wi
from weightscope.anatomy.permutation_groups import permutation_spec
from weightscope.errors import AnatomyError, DataError, SpecError, UsageError
from weightscope.fits.terms import explain, structure_of
from weightscope.networks import ConvNeXt, ViT
from weightscope.spec import WeightSpec
from weightscope.statistics.samples import WeightArray

DEPTH = 3
VO = ("blocks.*.attn.qkv.weight[v]", "blocks.*.attn.proj.weight", "channels x vo", "same block")
STRIPES = ("blocks.*.mlp.fc1.weight", "blocks.*.mlp.fc1.weight", "channels", "std")
NORM = ("blocks.*.norm2.bias", "blocks.*.mlp.fc1.weight", "channels", "same block")
ACROSS = ("blocks.*.mlp.fc2.weight", "blocks.*.mlp.fc2.weight", "channels", "1 apart")
PLANTED = {VO: [-0.1, -0.4], STRIPES: [2.0], NORM: [-0.5], ACROSS: [0.4]}
TENSORS = [*(f"blocks.*.attn.qkv.weight[{part}]" for part in "qkv"), VO[1], *NORM[:2], ACROSS[0]]
SCALES = {pattern: ([0.0], [1.0, 2.0]) for pattern in TENSORS}


def vit(depth=DEPTH, width=8):
    torch.manual_seed(0)
    return ViT(8, 4, width, depth, 2, 10, in_channels=1, expansion=2)


def population(scales, terms, networks=256, depth=DEPTH, seed=0):
    """Networks drawn from stated terms; tensors that are not stated keep their default weights, anew in each."""
    spec = WeightSpec.of(vit(depth))
    drawn = structure_of(spec, permutation_spec(spec), scales, [(*key, values) for key, values in terms.items()])
    rng = np.random.default_rng(seed)
    inner = drawn.spec.unpack(drawn.transform([rng.standard_normal((networks, *s)) for s in drawn.noise_shapes]))
    rest = rng.standard_normal((networks, spec.size)).astype(np.float32)
    for name, values in inner.items():
        for view in (v for v in drawn.permutations.views if v.tensor == name):
            view.write(spec.unpack(rest)[name], view.of(values).astype(np.float32))
    return WeightArray(rest, spec)


def test_blocks_that_no_pattern_names_are_told():
    network = ConvNeXt((8, 16), (1, 1), 3, 2, 10)
    scales = {"stages.0.blocks.*.mlp.fc1.weight": ([0.0], [1.0])}
    with pytest.warns(UserWarning, match=r"from_terms_: no pattern names `stages\.1\.blocks`: these blocks keep"):
        wi.from_terms_(network, scales=scales, terms=[])


@pytest.fixture(scope="module")
def planted():
    return explain(population(SCALES, PLANTED))


def test_planted_terms_are_found_with_their_size_and_no_others(planted):
    found = {(t.of, t.against, t.along, t.where): t for t in planted.terms}
    assert set(found) == set(PLANTED)
    assert found[VO].values == pytest.approx([-0.1, -0.4], abs=0.03)
    assert found[STRIPES].values == pytest.approx([2.0], abs=0.1)
    assert found[NORM].values == pytest.approx([-0.5], abs=0.05)
    assert found[ACROSS].values == pytest.approx([0.4], abs=0.06)
    for key, values in PLANTED.items():
        middle, half = (found[key].low + found[key].high) / 2, (found[key].high - found[key].low) / 2
        assert abs(middle - np.mean(values)) < 1.8 * half  # 3.6 standard errors, since the interval has 95 %
    assert planted.scales[VO[0]][1] == pytest.approx([1.0, 1.5, 2.0], rel=0.02)
    gains = {name: value - planted.log_prob["independent"] for name, value in planted.log_prob.items()}
    assert 0.9 < gains["terms"] / gains["exchangeable"] < 1.1
    assert sum(term.share for term in planted.terms) == pytest.approx(min(1, gains["terms"] / gains["exchangeable"]))


def test_of_independent_entries_no_term_is_found():
    """1 % over all kinds of entries: none expected in 3 populations."""
    found = [explain(population(SCALES, {}, networks=64, seed=seed)) for seed in range(3)]
    assert sum(len(one.terms) for one in found) == 0
    assert min(one.tested for one in found) > 300


def test_scales_that_three_depths_do_not_state_are_no_terms():
    """Independent entries, five and two times as large in the first of twelve blocks: no part differs from them."""
    uneven = {pattern: ([0.0], [5.0, 2.0, *[1.0] * 10]) for pattern in TENSORS}
    assert explain(population(uneven, {}, networks=64, depth=12), "*.mlp.fc1.weight").terms == ()


def test_of_few_networks_a_term_may_gain_more_than_all_numbers():
    found = explain(population(SCALES, {STRIPES: [1.5]}, networks=40))
    assert found.log_prob["exchangeable"] < found.log_prob["independent"] < found.log_prob["terms"]
    assert [(term.where, term.share) for term in found.terms] == [("std", 1.0)]
    assert "are more than exchangeable gains" in found.summary()


def test_the_code_draws_what_was_found_into_another_depth_and_width(planted, tmp_path, monkeypatch):
    planted.save(tmp_path / "stated_start.py")
    monkeypatch.syspath_prepend(tmp_path)
    from stated_start import start

    generator = torch.Generator().manual_seed(0)
    products = []
    for _ in range(20):
        network = start(vit(5, 16), generator=generator)
        value, output = network.blocks[4].attn.qkv.weight.detach()[32:], network.blocks[4].attn.proj.weight.detach()
        products.append(float((output @ value).diagonal().mean() / (output.std() * value.std() * 16)))
    assert np.mean(products) == pytest.approx(-0.4 * 15 / 16, abs=0.05)  # row means are not part of the term
    default = 1 / np.sqrt(3 * 16)
    assert float(network.blocks[0].attn.proj.weight.detach().std()) == pytest.approx(default, rel=0.15)
    assert float(network.blocks[4].attn.proj.weight.detach().std()) == pytest.approx(2 * default, rel=0.15)
    before = {name: p.clone() for name, p in network.named_parameters()}
    start(network, generator=generator, gain=0.0)
    assert {n for n, p in network.named_parameters() if torch.equal(p, before[n])} == {
        name for name in before if not name.startswith("blocks.")
    }


def test_contradicting_terms_become_the_nearest_correlations():
    three = [f"blocks.*.{name}" for name in ("norm1.bias", "norm2.bias", "mlp.fc2.bias")]
    pairs = {(a, b, "channels", "same block"): [-0.4] for a, b in zip(three, [*three[1:], three[0]], strict=True)}
    pairs = {
        (a, b, *rest) if three.index(a) < three.index(b) else (b, a, *rest): v for (a, b, *rest), v in pairs.items()
    }
    spec = WeightSpec.of(vit())
    order = {v.name: i for i, v in enumerate(permutation_spec(spec).views)}
    assert [order[n.replace("*", "0")] for n in three] == sorted(order[n.replace("*", "0")] for n in three)
    terms = [(*key, values) for key, values in pairs.items()]
    drawn = structure_of(spec, permutation_spec(spec), dict.fromkeys(three, ([0.0], [1.0])), terms, gain=10.0)
    found = next(c for c, k in zip(drawn.correlations, drawn.permutations.types, strict=True) if k.label == "channels")
    assert found[0, 1] == pytest.approx(-0.5, abs=0.01)  # three numbers cannot all be correlated by -0.9


def test_permutations_of_a_network_whose_names_are_not_known_are_given():
    module = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.GELU(), torch.nn.Linear(64, 3))
    scales = {"0.weight": ([0.0], [1.0]), "0.bias": ([0.0], [2.0])}
    terms = [("0.weight", "0.bias", "0", "outside", [0.3])]  # of each of 8 columns
    with pytest.raises(AnatomyError, match="no permutation specification"):
        wi.from_terms_(module, scales=scales, terms=terms)
    permutations = permutation_spec(module, torch.randn(2, 8))
    generator = torch.Generator().manual_seed(0)
    found = []
    for _ in range(50):
        wi.from_terms_(module, scales=scales, terms=terms, permutations=permutations, generator=generator)
        found.append(np.corrcoef(module[0].weight.detach().numpy()[:, 3], module[0].bias.detach().numpy())[0, 1])
    assert np.mean(found) == pytest.approx(0.3, abs=0.06)


def test_bad_input_says_what_to_do(tmp_path):
    spec = WeightSpec.of(vit())
    rng = np.random.default_rng(0)
    with pytest.raises(DataError, match="terms need at least 32 usable networks, found 20"):
        explain(WeightArray(rng.standard_normal((20, spec.size)), spec))
    with pytest.raises(DataError, match="selected tensors varies"):
        explain(WeightArray(np.ones((40, spec.size)), spec))
    with pytest.raises(UsageError, match="no tensor"):
        explain(WeightArray(rng.standard_normal((40, spec.size)), spec), "none.*")
    with pytest.raises(SpecError, match=r"scales: no tensor 'blocks.\*.mlp.fc9'; did you mean"):
        wi.from_terms_(vit(), scales={"blocks.*.mlp.fc9": ([0], [1])}, terms=[])
    with pytest.raises(SpecError, match=r"qkv.weight\[k\]' is missing, which is in one tensor with"):
        wi.from_terms_(vit(), scales={TENSORS[0]: ([0], [1])}, terms=[])
    for line, message in (
        ((*VO[:2], "chanels x vo", "same block", [0.1]), "expected one of along 'channels x vo', 'same block'"),
        ((*VO[1::-1], *VO[2:], [0.1]), "expected one of none in this order"),
        (("blocks.*.attn.v", *VO[1:], [0.1]), "no tensor in `scales` 'blocks.*.attn.v'; did you mean"),
        ((*VO, -0.3), "expected a list of numbers between -1 and 1, found -0.3"),
        ((*VO, [-2.0]), "expected a list of numbers between -1 and 1"),
        ((*STRIPES, [-0.6]), "expected a list of numbers between 0 and inf"),
        (VO, "expected (a, b, along, where, values)"),
    ):
        with pytest.raises(SpecError, match=re.escape(message)):
            wi.from_terms_(vit(), scales=SCALES, terms=[line])
    with pytest.raises(SpecError, match="std: expected a list of numbers between 0 and inf"):
        wi.from_terms_(vit(), scales=SCALES | {ACROSS[0]: ([0.0], [-1.0])}, terms=[])
    wi.from_terms_(vit(), scales=SCALES, terms=[(*VO[:2], "channels", "5 apart", [0.1])])  # of deeper networks
    with pytest.raises(UsageError, match="gain: expected a number >= 0, found -1"):
        wi.from_terms_(vit(), scales=SCALES, terms=[], gain=-1)


def test_command_line(tmp_path, capsys):
    pop = tmp_path / "tiny.pop"
    settings = (
        "--set",
        "network.width=8",
        "--set",
        "training.epochs=1",
        "--set",
        "data.train=64",
        "--set",
        "data.test=32",
    )
    code, _, err = run("collect", "digits-vit", "-n", 32, *settings, "-o", pop, capsys=capsys)
    assert code == 0, err
    code, out, err = run("fit-init", pop, "--explain", "-o", tmp_path / "tiny_start.py", capsys=capsys)
    assert code == 0, err
    assert "tested, are" in out
    assert "def start(module" in (tmp_path / "tiny_start.py").read_text()
    for arguments, message in (
        (("-o", tmp_path / "a.safetensors"), "expected .py with --explain"),
        (("-o", tmp_path / "my-start.py"), "expected a name that Python can import"),
        (("-o", tmp_path / "tiny_start.py"), "exists, and nothing in it says that this command wrote it"),
        (("-o", tmp_path / "a.py", "--gain", "3"), "--gain requires"),
        (
            ("-o", tmp_path / "a.py", "--structure", "dense"),
            "--structure: does not apply to a population with --explain",
        ),
        (("-o", tmp_path / "a.py", "--joint", "all"), "--joint: does not apply to a population with --explain"),
    ):
        code, _, err = run("fit-init", pop, "--explain", *arguments, capsys=capsys)
        assert (code, message in err) == (2, True), err
