"""`WeightSpec`: pack and unpack are exact inverses; anything that does not fit is refused by name."""

import numpy as np
import pytest
import torch
from torch import nn

from weightscope.errors import SpecError, UsageError
from weightscope.spec import TensorSpec, WeightSpec

SPEC = WeightSpec([TensorSpec("a.weight", (2, 3)), TensorSpec("a.bias", (2,)), TensorSpec("s", (), "statistic")])


@pytest.mark.parametrize(
    "sizes", [[()], [(3,)], [(2, 3), (), (4,)], [(0,), (2, 1, 4)], [(1, 0, 2)], [(2, 2, 3), (3, 2), (2,), (), (4, 1)]]
)
def test_unpack_inverts_pack_exactly(sizes: list[tuple[int, ...]]) -> None:
    spec = WeightSpec(TensorSpec(f"t{i}", shape) for i, shape in enumerate(sizes))
    rng = np.random.default_rng(0)
    tensors = {t.name: rng.standard_normal(t.shape).astype(np.float32) for t in spec}
    vector = spec.pack(tensors)
    assert vector.shape == (spec.size,)
    for name, value in spec.unpack(vector).items():
        np.testing.assert_array_equal(value, tensors[name])
    assert spec.pack(spec.unpack(vector)).tobytes() == vector.tobytes()
    assert WeightSpec.from_json(spec.to_json()) == spec
    assert WeightSpec.from_json(spec.to_json()).fingerprint == spec.fingerprint


def test_a_batch_of_vectors_unpacks_to_a_batch_of_tensors() -> None:
    rows = torch.arange(18.0).view(2, 9)
    assert SPEC.unpack(rows)["a.weight"].shape == (2, 2, 3)
    torch.testing.assert_close(SPEC.unpack(rows)["a.bias"], rows[:, 6:8])


def test_what_does_not_fit_is_named() -> None:
    good = {"a.weight": np.zeros((2, 3)), "a.bias": np.zeros(2), "s": np.zeros(())}
    with pytest.raises(SpecError, match=r"`a.weight`: expected \(2, 3\), found \(3, 2\)"):
        SPEC.pack(good | {"a.weight": np.zeros((3, 2))})
    with pytest.raises(SpecError, match=r"missing `a\.bias`; not in the spec `b`"):
        SPEC.pack({"a.weight": np.zeros((2, 3)), "s": np.zeros(()), "b": np.zeros(1)})
    with pytest.raises(SpecError, match="expected vectors of length 9, found 8"):
        SPEC.unpack(np.zeros(8))
    with pytest.raises(SpecError, match="`a` is duplicated"):
        WeightSpec([TensorSpec("a", (1,)), TensorSpec("a", (2,))])
    with pytest.raises(SpecError):
        WeightSpec.from_json('[["a"]]')


def test_select_keeps_the_order_and_refuses_patterns_without_a_match() -> None:
    assert SPEC.select("s,a.w*").names == ("a.weight", "s")
    assert SPEC.columns(SPEC.select("a.bias,s")).tolist() == [6, 7, 8]
    with pytest.raises(UsageError, match=r"no tensor matches 'b\*'; there are "):
        SPEC.select("a.*,b*")


def test_the_spec_of_a_module_names_statistics_and_leaves_out_ties_and_counters() -> None:
    module = nn.Sequential(nn.Linear(3, 3, bias=False), nn.BatchNorm1d(3), nn.Linear(3, 3, bias=False))
    module[2].weight = module[0].weight
    spec = WeightSpec.of(module)
    assert spec.names == ("0.weight", "1.weight", "1.bias", "1.running_mean", "1.running_var")
    assert [t.role for t in spec][-2:] == ["statistic", "statistic"]


def test_differences_name_every_tensor() -> None:
    other = WeightSpec([TensorSpec("a.weight", (3, 2)), TensorSpec("b", (1,)), TensorSpec("s", (), "statistic")])
    text = "\n".join(SPEC.differences(other))
    assert "`a.bias`: expected (2,), found none" in text
    assert "`b`: not expected" in text
    assert "`a.weight`: expected (2, 3) parameter, found (3, 2) parameter" in text
    assert SPEC.differences(SPEC) == []
    assert SPEC.differences(WeightSpec(reversed(SPEC.tensors))) == ["expected the same tensors in another order"]


def test_a_spec_is_iterated_indexed_and_searched() -> None:
    assert [t.name for t in SPEC] == list(SPEC.names)
    assert list(SPEC) == list(SPEC.tensors)
    assert len(SPEC) == 3
    assert "a.bias" in SPEC
    assert TensorSpec("a.bias", (2,)) in SPEC
    assert "a" not in SPEC
    assert TensorSpec("a.bias", (3,)) not in SPEC
    assert SPEC["a.bias"].shape == (2,)
    assert SPEC.matching(["s", "*.weight"]) == ["a.weight", "s"]
    for name, suggestion in (("a.bais", "did you mean 'a.bias'"), (0, "there are a.weight")):
        with pytest.raises(SpecError, match=rf"no tensor {name!r} in this spec of 3: {suggestion}"):
            SPEC[name]
    with pytest.raises(UsageError, match="expected a pattern"):
        SPEC.matching("")
