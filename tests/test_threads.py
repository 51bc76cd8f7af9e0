"""What other threads draw does not change what is trained, initialised, built or sampled here, and the reverse."""

import contextlib
import os
import random
import tempfile
import threading
from pathlib import Path

import fake_training as fake
import numpy as np
import own_code
import pytest
import tiny
import torch
from torch import nn

from weightscope import Population, collect
from weightscope._util.torch_random import seeded
from weightscope.analysis.within_network import skeleton
from weightscope.auditing import audit
from weightscope.errors import UsageError
from weightscope.fits.structure import structure_class
from weightscope.init import get
from weightscope.networks import build_for
from weightscope.training import train_tile
from weightscope.training.initial_weights import initial_weights

GRU = {"network": own_code.Gru, "training__engine": "loop"}
INITS = [{"name": name} for name in ("default", "kaiming_uniform", "random_filters", "trunc_normal", "xavier")]
SIZES = {"data__train": 32, "data__test": 10, "training__epochs": 1, "population__networks": 2}


@contextlib.contextmanager
def noise(path):
    """Another thread that draws from, seeds and restores all generators of the process, and reads a population."""
    over = threading.Event()

    def draw():
        moments = random.Random(0)
        while not over.is_set():
            torch.randn(3)
            torch.manual_seed(moments.randrange(99))
            with torch.random.fork_rng(devices=[]):
                Population(path).network(0)
            np.random.rand(3)  # noqa: NPY002 - what other threads do
            np.random.seed(moments.randrange(99))  # noqa: NPY002
            random.random()

    thread = threading.Thread(target=draw, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def bits(module):
    return b"".join(value.numpy().tobytes() for value in module.state_dict().values())


def collected(seed):
    with tempfile.TemporaryDirectory() as folder:
        plan = tiny.recipe(
            **SIZES, population__seed=seed, init=[{"name": "kaiming_uniform"}], training__kernels="torch"
        )
        population = collect(plan, Path(folder) / "a.pop", workers=1, device="cpu", progress=False)
        return population.weights().tobytes() + bits(population.network(1))


def trained(seed, **changes):
    return train_tile(tiny.recipe(**SIZES | changes, population__seed=seed), 0, device="cpu").weights.tobytes()


def started(seed):
    """Default starts, an initialiser, and the control of another."""
    inits = [INITS[seed % len(INITS)], {"name": "random_filters", "control": "scale"}]
    plan = tiny.recipe(population__seed=seed, init=inits)
    return initial_weights(plan, range(4), lambda: build_for(plan)).tobytes()


def sampled(seed):
    rng = np.random.default_rng(seed)
    structure = structure_class("diagonal").fit(rng.standard_normal((9, fake.SPEC.size)), fake.SPEC)
    return structure.sample(rng, 3).tobytes()


def audited(seed):
    network = get("mimetic_mlp")(own_network(seed), generator=torch.Generator().manual_seed(seed))
    return repr(audit(network, "mimetic_mlp").rows()).encode()


def own_network(seed):
    with seeded(seed):
        return build_for(tiny.recipe(network=tiny.NETWORKS["vit"]))


FUNCTIONS = {
    "collect": collected,
    "train_tile": trained,
    "train_tile by loop, with dropout": lambda seed: trained(seed, **GRU),
    "initial_weights": started,
    "sample": sampled,
    "audit": audited,
    "skeleton": lambda seed: bits(skeleton(own_network(seed), seed=seed)),
}


def check(case, path):
    """One function with one seed, alone and beside the noise."""
    draw = random.Random(case)
    name, seed = list(FUNCTIONS)[case % len(FUNCTIONS)], draw.randrange(1000)
    alone = FUNCTIONS[name](seed)
    with noise(path):
        beside = FUNCTIONS[name](seed)
    assert alone == beside, (name, seed)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("noise") / "a.pop"
    collect(tiny.recipe(**SIZES, training__kernels="torch"), path, workers=1, device="cpu", progress=False)
    return path


@pytest.mark.slow
@pytest.mark.parametrize("case", range(int(os.environ.get("CASES", 2 * len(FUNCTIONS)))))
def test_bits_do_not_depend_on_other_threads(case, path):
    check(case, path)


def test_the_noise_would_be_noticed(path):
    """By what draws from the generator of the process, after seeding it."""

    def drawn():
        torch.manual_seed(0)
        return b"".join(torch.randn(1).numpy().tobytes() for _ in range(3000))

    alone = drawn()
    with noise(path):
        assert any(drawn() != alone for _ in range(20))


def test_no_generator_of_the_process_is_read_or_written(path):
    def states():
        numpys = np.random.get_state(legacy=False)["state"]  # noqa: NPY002
        return torch.get_rng_state().tolist(), numpys["key"].tolist(), numpys["pos"], random.getstate()

    before = states()
    for function in FUNCTIONS.values():
        function(1)
    assert states()[1:] == before[1:]


OPERATIONS = {
    "rand": lambda: torch.rand(70, dtype=torch.float64),
    "randint": lambda: torch.randint(2, 10, (5,)),
    "randperm": lambda: torch.randperm(50),
    "rand_like": lambda: torch.rand_like(torch.zeros(9)),
    "normal_": lambda: torch.zeros(20).normal_(1, 2),
    "bernoulli": lambda: torch.bernoulli(torch.full((9,), 0.4)),
    "multinomial": lambda: torch.multinomial(torch.ones(9), 4),
    "poisson": lambda: torch.poisson(torch.ones(9)),
    "gamma": lambda: torch.distributions.Gamma(1.0, 1.0).sample((3,)),
    "dropout": lambda: nn.functional.dropout(torch.ones(50)),
    "gru": lambda: nn.GRU(4, 5, 2, dropout=0.5)(torch.ones(3, 2, 4))[0].detach(),
    "attention": lambda: nn.MultiheadAttention(8, 2, dropout=0.3)(*[torch.ones(5, 1, 8)] * 3)[0].detach(),
    "trunc_normal_": lambda: nn.init.trunc_normal_(torch.zeros(30)),
    "orthogonal_": lambda: nn.init.orthogonal_(torch.zeros(6, 6)),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_generator_of_our_own_gives_the_numbers_of_the_process(name):
    torch.manual_seed(5)
    expected = OPERATIONS[name]()
    state = torch.get_rng_state()
    with seeded(1), seeded(5):
        found = OPERATIONS[name]()
    assert torch.equal(found, expected)
    assert torch.equal(torch.get_rng_state(), state)


def test_what_takes_no_generator_is_refused():
    function = torch.ops.aten._scaled_dot_product_flash_attention.default
    with (
        seeded(0),
        pytest.raises(UsageError, match="draws random numbers that cannot be repeated beside other threads"),
    ):
        function(*[torch.ones(1, 1, 4, 4)] * 3, 0.5)
