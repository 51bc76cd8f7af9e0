"""Streams depend on (root, network, purpose) alone."""

import numpy as np
import pytest

from weightscope._util.seeding import Purpose, numpy_generator, sequence, torch_seed


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
