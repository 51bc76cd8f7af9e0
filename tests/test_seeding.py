"""Streams depend on (root, network, purpose) alone."""

import random

import numpy as np
import pytest
import torch

from weightscope._util.seeding import Purpose, numpy_generator, sequence, torch_seed
from weightscope._util.torch_random import seeded


def test_streams_are_stateless_and_distinct() -> None:
    seeds = {torch_seed(root, k, p) for root in range(3) for k in range(200) for p in Purpose}
    assert len(seeds) == 3 * 200 * len(Purpose)
    assert torch_seed(1, 5, Purpose.INIT) == torch_seed(1, 5, Purpose.INIT) < 2**63
    a, b = (numpy_generator(0, 3, Purpose.ORDER).random(4) for _ in range(2))
    np.testing.assert_array_equal(a, b)


def test_stored_values_never_change() -> None:
    """Populations on disk record seeds; these numbers pin the scheme."""
    assert [int(p) for p in Purpose] == list(range(len(Purpose)))
    assert sequence(0, 1, Purpose.ORDER).spawn_key == (1, 1)
    assert torch_seed(0, 0, Purpose.INIT) == 1317536309490288386


@pytest.mark.parametrize(("root", "network", "message"), [(-1, 0, "seed: .* >= 0, found -1"), (0, -1, "non-negative")])
def test_negative_numbers_are_refused(root: int, network: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        sequence(root, network, Purpose.INIT)


def test_seeded_gives_the_numbers_of_a_seed_and_restores_all_generators() -> None:
    def draw() -> tuple[list[float], float, float]:
        return torch.randn(3).tolist(), float(np.random.rand()), random.random()  # noqa: NPY002

    before = torch.get_rng_state(), np.random.get_state(legacy=False)["state"]["pos"], random.getstate()  # noqa: NPY002
    with seeded(5):
        first = draw()
        with seeded(2**62):  # more than NumPy's generator takes
            assert draw() != first
        later = draw()
    assert torch.equal(torch.get_rng_state(), before[0])
    assert np.random.get_state(legacy=False)["state"]["pos"] == before[1]  # noqa: NPY002
    assert random.getstate() == before[2]
    with seeded(5):
        assert (draw(), draw()) == (first, later)
    torch.manual_seed(5)
    assert torch.randn(3).tolist() == first[0]
