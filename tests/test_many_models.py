"""`products` and `attention-maps` of many models: workers change no number, and an error is that of one model."""

import contextlib
import json
import pickle
from concurrent.futures import Future
from functools import partial

import clusters
import fake_training as fake
import numpy as np
import pytest
import torch
from programs import run
from safetensors.torch import save_file

from weightscope._util import checks, workers
from weightscope._util.in_order import in_order
from weightscope.analysis.attention_products import products
from weightscope.errors import AnatomyError, WeightscopeError
from weightscope.networks import ConvMixer, ViT


@pytest.mark.parametrize("backend", ["loky", "dask", "ray"])
def test_results_come_in_order_and_an_error_in_its_place(backend):
    with clusters.two_workers(backend) as two:
        found = list(in_order(partial(checks.count, "n"), [3, 2, 0, *range(1, 10)], "abcdefghijkl", two))
    assert "n: expected" in str(found.pop(2))
    assert found == [3, 2, *range(1, 10)]


def test_few_results_wait_for_an_earlier_one(monkeypatch):
    """Of 200, where the first takes longest, no more than 8 are begun before it ends."""
    begun, late = [], Future()

    @contextlib.contextmanager
    def engine(task, _workers, _running):
        def submit(item):
            begun.append(item.index)
            if len(begun) == 8:
                late.set_result(pickle.dumps(((0, []), None)))
            with fake.in_this_process(task, None, None) as here:
                return here(item) if item.index else late

        yield submit

    monkeypatch.setitem(workers.ENGINES, "loky", engine)
    results = in_order(abs, range(200), [str(k) for k in range(200)], 2)
    assert next(results) == 0
    assert begun == [*range(8)]
    assert list(results) == list(range(1, 200))


def test_a_worker_that_dies_is_named(monkeypatch):
    def dies(value):
        raise SystemExit

    fake.use(monkeypatch)
    with pytest.raises(WeightscopeError, match=r"^second: its worker died.*with fewer workers"):
        list(in_order(lambda value: dies(value) if value == 2 else value, [1, 2], ["first", "second"], 2))


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Three ViTs' files, one model that has no attention, one file that is damaged."""
    folder = tmp_path_factory.mktemp("models")
    for seed in range(3):
        torch.manual_seed(seed)
        save_file(ViT(32, 8, 48, 2, 3, 5).state_dict(), folder / f"vit{seed}.safetensors")
    save_file(ConvMixer(8, 2, 3, 4, 5).state_dict(), folder / "conv.safetensors")
    (folder / "bad.safetensors").write_bytes(b"no model")
    return folder


HEADS = {"num_attention_heads": 3}


def test_products_have_equal_numbers_by_all_workers(models, monkeypatch):
    monkeypatch.chdir(models)  # relative paths are those of this process's folder
    files = ["vit2.safetensors", "conv.safetensors", "vit0.safetensors", "bad.safetensors", "vit1.safetensors"]
    alone, spread = (products(*files, config=HEADS, workers=each) for each in (1, 2))
    assert [info.label for info in alone.sources] == ["vit2", "vit0", "vit1"]
    assert alone.to_dict() == spread.to_dict()
    assert all(np.array_equal(alone.corners[key], spread.corners[key]) for key in alone.corners)
    single = products("vit0.safetensors", config=HEADS)
    assert single.records == [row for row in alone.records if row["source"] == "vit0"]
    assert set(spread.failed) == {"conv", "bad"}
    assert "warning: conv: left out: expected attention modules" in spread.text()
    with pytest.raises(AnatomyError, match="conv: expected attention"):
        products("conv.safetensors", "bad.safetensors", config=HEADS)


def test_the_command_shows_the_others(models, tmp_path, capsys):
    files = [models / f"{name}.safetensors" for name in ("vit0", "conv", "vit1")]
    options = ["--num-heads", 3, "--workers", 2, "-o", tmp_path / "a.png", "--json", tmp_path / "a.json"]
    code, out, err = run("products", *files, *options, capsys=capsys)
    assert code == 3
    assert "warning: conv: left out" in out
    assert "1 of 3 models failed: conv; the others are shown" in err
    assert (tmp_path / "a.png").exists()
    assert set(json.loads((tmp_path / "a.json").read_text())["failed"]) == {"conv"}
