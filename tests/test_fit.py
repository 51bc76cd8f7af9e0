import json
import weakref

import numpy as np
import pytest

from weightscope._util.seeding import Purpose, numpy_generator
from weightscope.errors import DataError, UsageError
from weightscope.fits import STRUCTURES, Structure, fitting, load_artifact
from weightscope.fits.fitting import fit, grouped
from weightscope.spec import TensorSpec, WeightSpec
from weightscope.statistics.samples import WeightArray

P, N = 8, 6


def network_spec():
    tensors = [TensorSpec("stem.weight", (N, 3))]
    for i in range(2):
        at = f"stages.0.blocks.{i}"
        tensors += [
            TensorSpec(f"{at}.conv_dw.weight", (N, 1, 3, 3)),
            TensorSpec(f"{at}.mlp.fc1.weight", (P, N)),
            TensorSpec(f"{at}.mlp.fc1.bias", (P,)),
            TensorSpec(f"{at}.mlp.fc2.weight", (N, P)),
        ]
    return WeightSpec([*tensors, TensorSpec("head.weight", (10, N))])


SPEC = network_spec()
FC1 = "stages.0.blocks.0.mlp.fc1.weight"


def population(size=200, seed=0):
    return np.random.default_rng(seed).standard_normal((size, SPEC.size)).astype(np.float32)


def put(weights, name, values):
    weights[:, SPEC.slices[name]] = values.reshape(len(weights), -1)
    return weights


def stripes(size, rng):
    return rng.standard_normal((size, P, N)) + rng.standard_normal((size, 1, N))


def kronecker(size, rng):
    a, b = (np.tril(rng.standard_normal((n, n))) + 2 * np.eye(n) for n in (P, N))
    return a @ rng.standard_normal((size, P, N)) @ b.T


def diagonal(size, rng):
    return rng.standard_normal((size, P, N)) * rng.permutation(np.geomspace(0.1, 10, P * N)).reshape(P, N)


def factors(size, rng):
    return rng.standard_normal((size, 2)) @ rng.standard_normal((2, P * N)) + 0.3 * rng.standard_normal((size, P * N))


def dense(size, rng):
    return rng.standard_normal((size, P * N)) @ rng.standard_normal((P * N, P * N))


def planted(make, size=200):
    """A source whose first fc1 has a known structure."""
    return WeightArray(put(population(size), FC1, make(size, np.random.default_rng(1))), SPEC)


@pytest.mark.parametrize(
    ("make", "size", "expected"),
    [
        (stripes, 200, "group_means"),
        (diagonal, 200, "diagonal"),
        (kronecker, 200, "kronecker"),
        (factors, 200, "low_rank (rank 2)"),
        (dense, 2000, "dense"),
    ],
)
def test_the_true_structure_is_chosen(make, size, expected):
    result = fit(planted(make, size), FC1, joint="tensor")
    (group,) = result.groups
    assert group.label == expected
    (chosen,) = [row for row in result.table if row["chosen"]]
    assert chosen["structure"] == expected
    assert chosen["difference"] == 0
    assert all(row["difference"] < 0 for row in result.table if row is not chosen and row["failed"] is None)


def test_independent_entries_are_not_given_structure():
    # Group means hold the isotropic covariance and have three parameters more: a toss between these two. The others
    # lose about parameters / (2 N) nats, which is four standard errors when every network is scored.
    result = fit(WeightArray(population(), SPEC), FC1, joint="tensor", holdout=5)
    rows = {row["structure"]: row for row in result.table}
    assert result.groups[0].label in ("isotropic", "group_means")
    assert rows["isotropic"]["difference"] > -3 * rows["isotropic"]["difference_se"] - 1e-12
    for name in ("diagonal", "kronecker", "low_rank (rank 1)"):
        assert rows[name]["difference"] < -2 * rows[name]["difference_se"]


def test_the_table_is_what_it_says():
    source = planted(stripes)
    result = fit(source, FC1, structure=("isotropic", "group_means"), joint="tensor", seed=3)
    assert result.settings == {"select": FC1, "joint": "tensor", "holdout": 0.2, "seed": 3, "held_out": 40}
    # By hand: the same split, the same scores.
    held_out = numpy_generator(3, 0, Purpose.STRUCTURE).permutation(200)[:40]
    data, sub = source.weights[:, SPEC.slices[FC1]].astype(np.float64), SPEC.select(FC1)
    fits = [STRUCTURES[name].fit(np.delete(data, held_out, axis=0), sub) for name in ("isotropic", "group_means")]
    one, other = (fitted.log_prob(data[np.sort(held_out)]) for fitted in fits)
    row = result.table[0]
    assert (row["structure"], row["parameters"]) == ("isotropic", 2)
    for key, values in (("log_prob", one), ("difference", one - other)):
        assert row[key] == pytest.approx(values.mean())
        assert row[f"{key}_se"] == pytest.approx(values.std(ddof=1) / np.sqrt(40))
    # The chosen structure is fitted again to all networks.
    again = STRUCTURES["group_means"].fit(data, sub)
    np.testing.assert_allclose(result.groups[0].structure.eigenvalues, again.eigenvalues)
    folds = fit(source, FC1, structure=("isotropic", "group_means"), holdout=5)
    assert folds.settings["held_out"] == 200  # every network
    assert folds.groups[0].label == "group_means"
    assert folds.table[0]["difference_se"] > 0


def test_joint_choices_group_the_tensors():
    select = SPEC.select("*.mlp.*")
    assert list(grouped(select, "tensor")) == list(select.names)
    blocks = grouped(select, "block")
    assert list(blocks) == ["stages.0.blocks.0.mlp", "stages.0.blocks.1.mlp"]
    assert blocks["stages.0.blocks.1.mlp"].names == tuple(n for n in select.names if ".1." in n)
    assert grouped(select, "all") == {"all": select}
    assert list(grouped(SPEC.select("stem.*,head.*"), "block")) == ["stem.weight", "head.weight"]


def test_a_dependence_between_tensors_is_found_jointly_only():
    weights = population(400)
    fc1, fc2 = FC1, FC1.replace("fc1", "fc2")
    one, other = (weights[:, SPEC.slices[name]].reshape(-1, *SPEC[name].shape) for name in (fc1, fc2))
    source = WeightArray(put(weights, fc2, 0.1 * other - one.transpose(0, 2, 1)), SPEC)
    jointly = fit(source, f"{fc1},{fc2}", joint="block")
    (group,) = jointly.groups
    assert group.label == "dense"
    samples = SPEC.select(f"{fc1},{fc2}").unpack(jointly.sample(np.random.default_rng(0), 2000))
    assert np.corrcoef(samples[fc1][:, 2, 3], samples[fc2][:, 3, 2])[0, 1] < -0.8
    separately = fit(source, f"{fc1},{fc2}", joint="tensor")
    assert {g.label for g in separately.groups} == {"isotropic"}
    best = max(r["log_prob"] for r in jointly.table if r["failed"] is None)
    total = [r for r in separately.table if r["group"] == "(all)" and r["chosen"]]
    assert best > total[0]["log_prob"]


def test_totals_add_the_groups_up():
    result = fit(WeightArray(population(), SPEC), joint="tensor")
    assert len(result.groups) == 4
    single = [row for row in result.table if row["group"] != "(all)"]
    for total in result.table[len(single) :]:
        key = "chosen" if total["chosen"] else "structure"
        parts = [row for row in single if row[key] == total[key]]
        assert len(parts) == 4
        assert total["log_prob"] == pytest.approx(sum(row["log_prob"] for row in parts))
        assert total["parameters"] == sum(row["parameters"] for row in parts)


def test_candidates_that_cannot_be_fitted_are_shown_with_the_reason():
    result = fit(WeightArray(population(), SPEC), "*.mlp.fc1.*", joint="block")
    failed = {row["structure"]: row["failed"] for row in result.table if row["failed"]}
    assert set(failed) == {"kronecker", "exchangeable"}
    assert "no permutation specification" in failed["exchangeable"]
    assert "two or more axes, found `stages." in failed["kronecker"]
    assert "two or more axes" in result.text()
    with pytest.raises(DataError, match=r"`stages.0.blocks.0.mlp`: no structure can be fitted: kronecker: a Kronecker"):
        fit(WeightArray(population(), SPEC), "*.mlp.fc1.*", structure="kronecker")


def test_options_and_candidates_of_low_rank():
    source = planted(factors)
    several = fit(source, FC1, structure="low_rank")
    assert [row["structure"] for row in several.table] == [f"low_rank (rank {2**k})" for k in range(4)]
    one = fit(source, FC1, structure="low_rank", options={"rank": 3})
    assert [row["structure"] for row in one.table] == ["low_rank (rank 3)"]
    assert one.groups[0].options == {"rank": 3}
    with pytest.raises(UsageError, match="dense has no option 'rank'; its options are none"):
        fit(source, FC1, structure="dense", options={"rank": 3})
    with pytest.raises(UsageError, match="need one structure by name"):
        fit(source, FC1, options={"rank": 3})


def test_frozen_tensors_are_kept_and_counted():
    weights = population()
    frozen, conv = "stages.0.blocks.0.conv_dw.weight", "stages.0.blocks.1.conv_dw.weight"
    put(weights, frozen, np.tile(np.linspace(-1, 1, 54), (200, 1)))
    weights[:, SPEC.slices[conv].start + 4] = 0.125
    result = fit(WeightArray(weights, SPEC), "*.conv_dw.weight", joint="tensor")
    whole, part = result.groups
    assert (whole.label, whole.fixed, whole.structure) == ("fixed", 54, None)
    assert part.fixed == 1
    assert part.structure.spec == WeightSpec([TensorSpec(conv, (53,))])
    samples = result.spec.unpack(result.sample(np.random.default_rng(0), 5))
    np.testing.assert_array_equal(samples[frozen], weights[:5, SPEC.slices[frozen]].reshape(5, N, 1, 3, 3))
    assert (samples[conv][:, 0, 0, 1, 1] == 0.125).all()
    assert np.ptp(samples[conv].reshape(5, -1)[:, 5:], axis=0).min() > 0
    assert "fixed, it never varies" in result.text()
    assert "1 entries never vary" in result.text()
    together = fit(WeightArray(weights, SPEC), "*.conv_dw.weight", joint="all")
    assert together.groups[0].fixed == 55
    np.testing.assert_array_equal(together.sample(np.random.default_rng(0), 1)[0, :54], weights[0, SPEC.slices[frozen]])


def test_networks_that_diverged_are_left_out_and_counted():
    weights = population()
    weights[[3, 50], SPEC.slices[FC1].start] = np.nan

    class Source(WeightArray):
        def marked_chunks(self, select="*", size=None):
            yield from ((rows, np.arange(200) == 7) for rows in self.chunks(select, size))

    result = fit(Source(weights, SPEC), FC1, structure="diagonal")
    assert (result.networks, result.excluded) == (197, 3)
    assert "197 networks (3 excluded)" in result.text()
    keep = np.delete(weights, [3, 7, 50], axis=0)
    expected = fit(WeightArray(keep, SPEC), FC1, structure="diagonal")
    np.testing.assert_array_equal(result.groups[0].structure.variance, expected.groups[0].structure.variance)


def test_the_seed_decides_and_chunks_do_not():
    source = WeightArray(population(), SPEC)
    first, again, other = (fit(source, FC1, structure="diagonal", seed=s).table[0]["log_prob"] for s in (0, 0, 1))
    assert first == again != other

    class Pieces(WeightArray):
        def chunks(self, select="*", size=None):
            yield from super().chunks(select, 7)

    assert fit(Pieces(source.weights, SPEC), FC1, structure="diagonal").table[0]["log_prob"] == first


def test_provenance_and_text(tmp_path):
    class Source(WeightArray):
        path = tmp_path / "digits.pop"

    result = fit(Source(population(), SPEC), FC1, structure=["isotropic", "dense"])
    assert result.provenance["source"] == "digits.pop"
    assert result.provenance["network_spec"] == SPEC.fingerprint
    json.dumps(result.to_dict(), allow_nan=False)
    lines = result.text().splitlines()
    assert lines[0] == "200 networks (0 excluded), log-likelihood of 40 held out, nats each"
    assert any(line.startswith("* ") and line.endswith("best") for line in lines)
    assert max(map(len, lines)) <= 120
    assert load_artifact(result.save(tmp_path / "a.safetensors")).text() == result.text()


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"select": "nothing"}, UsageError, "no tensor matches 'nothing'"),
        ({"structure": "full"}, UsageError, "no structure 'full'; there are isotropic"),
        ({"joint": "layer"}, UsageError, "joint: expected one of 'tensor', 'block', 'all', found 'layer'"),
        ({"holdout": 0.0}, UsageError, "holdout: expected a share between 0 and 1"),
        ({"holdout": 0.001}, DataError, r"too few networks .* 200 usable \(0 excluded\)"),
        ({"structure": "low_rank", "options": {"rank": "three"}}, DataError, "rank: expected 1 to"),
    ],
)
def test_bad_arguments(arguments, error, message):
    with pytest.raises(error, match=message):
        fit(WeightArray(population(), SPEC), **{"select": FC1, "structure": "isotropic", **arguments})


class Stream:
    """N networks of D entries, made chunk by chunk; refuses to make a chunk while two others are still in memory."""

    spec = WeightSpec([TensorSpec("a.mlp.fc1.weight", (20, 15)), TensorSpec("a.mlp.fc2.weight", (10, 20))])

    def __init__(self, n):
        self.n, self.size, self.alive = n, 400, []

    def chunks(self, select="*", size=None):
        columns = self.spec.columns(self.spec.select(select))
        for start in range(0, self.n, self.size):
            self.alive = [reference for reference in self.alive if reference() is not None]
            assert len(self.alive) <= 1, "more than one chunk is held"
            rng = np.random.default_rng(start)
            rows = rng.standard_normal((min(self.size, self.n - start), self.spec.size)) + rng.standard_normal()
            chunk = (rows * np.linspace(0.5, 2, self.spec.size)).astype(np.float32)[:, columns]
            self.alive.append(weakref.ref(chunk))
            yield chunk
            del chunk, rows


@pytest.mark.slow
def test_structures_from_moments_hold_one_chunk(monkeypatch):
    monkeypatch.setattr(fitting, "HELD", 0)
    chosen = ["isotropic", "group_means", "diagonal"]
    assert fit(Stream(2000), structure=chosen, joint="tensor").networks == 2000


def test_a_small_source_is_read_once_and_a_large_one_for_each_pass(monkeypatch):
    class Counted(WeightArray):
        reads = 0

        def chunks(self, select="*", size=None):
            self.reads += 1
            return super().chunks(select, 70)

    fits = []
    for held, reads in ((1 << 28, 1), (0, 4)):
        monkeypatch.setattr(fitting, "HELD", held)
        source = Counted(population(), SPEC)
        fits.append(fit(source, FC1, structure=["isotropic", "diagonal"]).to_dict())
        assert source.reads == reads
    assert fits[0] == fits[1]


class Spherical(Structure):
    """A structure as a user would write it: N(0, s^2 I) with its own arrays."""

    options = ("mean_too",)

    def __init__(self, spec, mean, scale, parameters=0, diagnostics=None):
        super().__init__(spec, mean, parameters, diagnostics)
        self.scale = float(scale)

    @classmethod
    def fit(cls, data, spec, *, mean_too=False):
        mean = data.mean(axis=0) if mean_too else np.zeros(spec.size)
        return cls(spec, mean, np.sqrt(np.mean((data - mean) ** 2)), 1 + mean_too * spec.size)

    @property
    def noise_shapes(self):
        return ((self.spec.size,),)

    def apply_root(self, noise):
        return self.scale * noise[0]

    def covariance(self):
        return self.scale**2 * np.eye(self.spec.size)

    def log_prob(self, x):
        z = (x - self.mean) / self.scale
        return -0.5 * (z**2).sum(-1) - self.spec.size * (np.log(self.scale) + 0.5 * np.log(2 * np.pi))

    def _arrays(self):
        return {"scale": np.array(self.scale)}

    @classmethod
    def from_tensors(cls, tensors, spec, parameters=0, diagnostics=None):
        return cls(spec, tensors["mean"], tensors["scale"], parameters, diagnostics)


class Wide(STRUCTURES["diagonal"]):
    """A registered structure with a change; streamed."""

    @classmethod
    def from_moments(cls, moments, spec):
        fitted = super().from_moments(moments, spec)
        return cls(spec, fitted.mean, 4 * fitted.variance, None, fitted.parameters)


REFERENCE = f"{__name__}:Spherical"


@pytest.mark.parametrize("structure", [Spherical, REFERENCE])
def test_a_structure_of_ones_own(structure, tmp_path):
    source = WeightArray(population(), SPEC)
    result = fit(source, FC1, structure=["diagonal", structure], holdout=5)
    assert [row["structure"] for row in result.table] == ["diagonal", "Spherical"]
    assert result.groups[0].label == "Spherical"  # one number instead of 48 variances
    again = fit(source, FC1, structure=structure, options={"mean_too": True})
    assert again.groups[0].label == "Spherical (mean_too True)"
    path = result.save(tmp_path / "own.safetensors")
    header = result.to_dict()["groups"][0]
    assert (header["structure"], len(header["source_hash"])) == (REFERENCE, 16)
    loaded = load_artifact(path, trust=True)
    assert loaded.to_dict() == result.to_dict()
    assert isinstance(loaded.groups[0].structure, Spherical)
    with pytest.raises(UsageError, match="--trust"):
        load_artifact(path)
    with pytest.raises(UsageError, match="different names"):
        fit(source, FC1, structure=["diagonal", "diagonal"])


def test_a_registered_structure_with_a_change():
    weights = population()
    result = fit(WeightArray(weights, SPEC), FC1, structure=Wide)
    plain = STRUCTURES["diagonal"].fit(weights[:, SPEC.slices[FC1]], SPEC.select(FC1))
    np.testing.assert_allclose(result.groups[0].structure.variance, 4 * plain.variance)


def test_results_are_tables():
    result = fit(WeightArray(population(), SPEC), joint="tensor", structure=["isotropic", "diagonal"])
    assert repr(result) == "<PopulationFit: 4 tensors in 4 groups, 200 networks: diagonal, isotropic>"
    assert result.rows() == list(result.table)
    assert len(result.to_pandas()) == len(result.table) == 4 * 2 + 3


def test_too_few_networks():
    weights = population(10)
    weights[:, SPEC.slices[FC1].start] = np.nan
    with pytest.raises(DataError, match=r"0 usable \(10 excluded\)"):
        fit(WeightArray(weights, SPEC), FC1)
    assert fit(WeightArray(population(10), SPEC), FC1).settings["held_out"] == 2
    with pytest.raises(UsageError, match="`b` has no entries"):
        fit(WeightArray(np.zeros((9, 2)), WeightSpec([TensorSpec("a", (2,)), TensorSpec("b", (0, 3))])), "*")


def test_what_does_not_fit_into_memory_is_refused_before_anything_is_read(monkeypatch):
    class Unread(WeightArray):
        def chunks(self, select="*", size=None):
            raise AssertionError("read")

    source = planted(stripes)
    needed = 40 * len(source) * P * N
    monkeypatch.setattr(fitting, "available_memory", lambda: needed - 1)
    with pytest.raises(DataError, match=r"low_rank: 0\.0 GB needed for 200 networks, 0\.0 available"):
        fit(Unread(source.weights, source.spec), FC1, structure="low_rank")
    table = fit(source, FC1, structure=["group_means", "low_rank"]).table
    assert {row["structure"].partition(" ")[0]: row["failed"] is None for row in table} == {
        "group_means": True,
        "low_rank": False,
    }
    monkeypatch.setattr(fitting, "available_memory", lambda: needed)
    assert all(row["failed"] is None for row in fit(source, FC1, structure="low_rank").table)
