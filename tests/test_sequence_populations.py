"""Populations of networks for sequences: training, metrics, the tile rule, resuming, and wrong input."""

import math
from functools import partial

import numpy as np
import pytest
import references_sequences as reference
import tiny
import tomli_w
import torch
from plain import train_sequences_alone
from programs import ROOT, run, script
from tiny import assert_same_weights

from weightscope._util.seeding import Purpose, torch_seed
from weightscope.data import SequenceSource, load
from weightscope.data.sequence_config import TASK_SIZES, sequence_length
from weightscope.data.sequences import TASKS, MarkovSource, cross_entropy
from weightscope.errors import DataError, RecipeError, UsageError
from weightscope.networks.sequences import TokenEmbedding
from weightscope.recipe import Recipe
from weightscope.spec import WeightSpec
from weightscope.training import train_tile
from weightscope.training.collection import collect
from weightscope.training.optimiser import Plateau

pytestmark = pytest.mark.usefixtures("trained_here")

BASE = {
    "network": {"type": "mamba", "width": 8, "depth": 1, "state": 3},
    "data": {"name": "copy", "length": 3, "vocabulary": 6, "train": 24, "test": 10},
    "training": {"epochs": 2, "batch_size": 4, "learning_rate": 0.01, "weight_decay": 0.1},
    "population": {"networks": 3, "tile": 2, "seed": 5},
}
NETWORKS = {
    "mamba": BASE["network"],
    "mamba2": {"type": "mamba2", "width": 8, "depth": 1, "state": 4, "head_width": 8},
    "transformer": {"type": "transformer", "width": 8, "depth": 1, "heads": 2, "context": 32},
    "dropout": {"type": "transformer", "width": 8, "depth": 1, "heads": 2, "context": 32, "embedding_dropout": 0.4},
    "hybrid": {"type": "mamba", "width": 8, "depth": 2, "state": 3, "layers": ["default", "attention"]},
}


recipe = partial(tiny.recipe, BASE)


def error_of(*arguments, capsys):
    """The one line of an error, whose exit code is that of wrong input or, 3, of data."""
    code, _, err = run(*arguments, capsys=capsys)
    assert code == (3 if "--data" in arguments and "data.length" not in err else 2), err
    assert err.count("\n") == 1, err
    return err


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["batched", "loop"])
@pytest.mark.parametrize("name", NETWORKS)
def test_networks_train_as_alone(name, engine):
    """Weights and losses of torch's own modules, AdamW, gradient clipping and cross entropy."""
    plan = recipe(network=NETWORKS[name], training__engine=engine)
    tile = train_tile(plan, 1, device="cpu")
    for row, losses, k in zip(tile.weights, tile.metrics["train_loss_per_epoch"], (2, 3), strict=True):
        network, expected = train_sequences_alone(plan, k)
        np.testing.assert_allclose(losses, expected, rtol=1e-4)
        assert_same_weights(WeightSpec.of(network), row, network, atol=1e-4)
    assert not np.allclose(tile.weights[0], tile.weights[1], atol=1e-2), "each network has seeds of its own"


@pytest.mark.parametrize("engine", ["batched", "loop"])
def test_packed_strings_train_as_alone(engine):
    """The mean is over the scored tokens, which differ between sequences; over all tokens it would be less."""
    data = BASE["data"] | {"shortest": 1, "begin": True, "stop": True, "context": 20}
    plan = recipe(data=data, training__engine=engine)
    tile = train_tile(plan, 0, device="cpu")
    network, expected = train_sequences_alone(plan, 1)
    np.testing.assert_allclose(tile.metrics["train_loss_per_epoch"][1], expected, rtol=1e-4)
    assert_same_weights(WeightSpec.of(network), tile.weights[1], network, atol=1e-4)
    assert expected[0] > 1
    (held_out,) = load(plan.data).held_out[2]
    with torch.no_grad():
        found = network.eval()(held_out.tokens).argmax(2) == held_out.targets
    right = found[:, 2 * 3 + 1 : -1].double().mean()  # 6 tokens of `$ ...... | ...... .`
    assert tile.metrics["test_accuracy_2x"][1] == pytest.approx(float(right), abs=1e-6)


def test_whole_vectors_are_dropped_in_training_only():
    torch.manual_seed(0)
    layer, tokens = TokenEmbedding(2000, 3, dropout=0.25), torch.randint(2000, (40, 50))
    plain = layer.eval()(tokens)
    dropped = (layer.train()(tokens) / plain).flatten(0, 1).round(decimals=4)  # (B n, d)
    assert set(dropped.unique().tolist()) == set(torch.tensor([0, 1.3333]).tolist())
    by_token: dict[int, set[float]] = {}
    for token, row in zip(tokens.flatten().tolist(), dropped, strict=True):
        by_token.setdefault(token, set()).update(row.tolist())
    assert all(len(values) == 1 for values in by_token.values()), "all channels and places of a token alike"
    share = sum(values == {0.0} for values in by_token.values()) / len(by_token)
    assert abs(share - 0.25) < 4 * (0.25 * 0.75 / len(by_token)) ** 0.5  # false alarms: 6e-5
    with pytest.raises(UsageError, match=r"embedding_dropout: expected a rate in \[0, 1\), found 1"):
        TokenEmbedding(5, 2, dropout=1)


def test_each_networks_rate_is_cut_where_its_validation_loss_no_longer_improves():
    """Other sequences than the test ones are followed, and the networks are those that the rates train alone."""
    training = {"schedule": "plateau", "patience": 0, "factor": 0.3, "epochs": 8, "warmup": 0.0}
    training |= {"learning_rate": [0.01, 0.1], "batch_size": 4, "weight_decay": 0.1}
    plan = recipe(training=training, data__train=8, data__test=4)
    tile = train_tile(plan, 0, device="cpu")
    losses, used = tile.metrics["validation_loss_per_epoch"], tile.metrics["learning_rate_per_epoch"]
    assert (losses[:, -1] != tile.metrics["test_loss"]).all()
    again = Plateau(np.array([0.01, 0.1]), 0.3, 0)
    np.testing.assert_array_equal(used[:, 1:].T, [again.step(row) for row in losses.T[:-1]])
    assert len(set(used[0])) == 1
    assert len(set(used[1])) == 2, "each has a state of its own"
    for k in range(2):
        network, _ = train_sequences_alone(plan.replace({"training.learning_rate": 0.01}), k, rates=used[k])
        assert_same_weights(WeightSpec.of(network), tile.weights[k], network, atol=1e-4)
    valid, test = load(plan.data).part("valid")[0], load(plan.data).held_out[1][0]
    assert not torch.equal(valid.tokens, test.tokens)
    with torch.no_grad():
        found = float(cross_entropy(network.eval()(valid.tokens), valid))
    assert losses[1, -1] == pytest.approx(found, rel=1e-3)


def test_the_validation_part_takes_the_place_of_the_test_part():
    plain, valid = (load(recipe(data__held_out=part).data) for part in ("test", "valid"))
    for multiple in (1, 2, 4):
        assert torch.equal(valid.held_out[multiple][0].tokens, plain.part("valid", multiple)[0].tokens)
        assert not torch.equal(valid.held_out[multiple][0].tokens, plain.held_out[multiple][0].tokens)
    tile = train_tile(recipe(data__held_out="valid", training__schedule="plateau"), 0, device="cpu")
    assert "validation_loss" not in tile.metrics, "it is the held-out loss"


@pytest.mark.parametrize("task", sorted(TASKS))
def test_accuracies_are_counted_by_hand(task, tmp_path):
    """At 1, 2 and 4 times the length: a solver's answers to strings that are drawn again from the held-out stream."""
    sizes = {"name": task, "length": 4, "vocabulary": 18, "train": 8, "test": 6}
    plan = recipe(data=sizes, population__networks=2, training__epochs=1)
    population = collect(plan, tmp_path / "a.pop", workers=1, device="cpu", progress=False)
    names = ("test_accuracy", "test_accuracy_2x", "test_accuracy_4x")
    assert tuple(metric.name for metric in plan.data.metrics) == (*names, "test_loss")
    for multiple, metric in zip((1, 2, 4), names, strict=True):
        length, generator = multiple * 4, torch.Generator().manual_seed(torch_seed(0, multiple, Purpose.HELD_OUT))
        drawn = TASKS[task](generator, 6, length, 18)
        assert drawn.tokens.shape[1] == sequence_length(task, length)
        for k in range(2):
            with torch.no_grad():
                found = population.network(k).eval()(drawn.tokens).argmax(2)
            right = total = 0
            for row, last, given in zip(drawn.tokens.tolist(), drawn.targets[:, -1].tolist(), found, strict=True):
                string, asked = row[:length], [*row[length + 1 :], last]
                for i, token in enumerate(reference.answer(task, string, 18, asked)):
                    total += token is not None
                    right += token is not None and int(given[length + i]) == token
            assert population.metrics[metric][k] == pytest.approx(right / total, abs=1e-6)


@pytest.mark.slow
def test_a_network_does_not_depend_on_the_size_of_its_population(tmp_path):
    small = collect(recipe(), tmp_path / "small.pop", workers=1, device="cpu", progress=False)
    large = recipe(population__networks=6)
    large = collect(large, tmp_path / "large.pop", workers=2, device="cpu", progress=False)
    np.testing.assert_array_equal(small.weights(), large.weights()[:3])
    grown = collect(recipe(), tmp_path / "small.pop", networks=6, workers=1, device="cpu", progress=False)
    for tile in range(3):
        name = f"shards/{tile:05}.h5"
        assert (grown.path / name).read_bytes() == (large.path / name).read_bytes()


@pytest.mark.slow
def test_the_primary_metric_of_a_markov_source_is_bits_and_has_the_entropy_as_its_bound():
    data = {"name": "markov", "vocabulary": 5, "length": 12, "train": 600, "test": 50}
    training = {"epochs": 4, "learning_rate": 0.03, "batch_size": 20}
    found = train_tile(recipe(data=data, training=training), 0, device="cpu").metrics
    np.testing.assert_allclose(found["test_bits"], found["test_loss"] / math.log(2), rtol=1e-6)
    np.testing.assert_allclose(found["test_perplexity"], np.exp(found["test_loss"]), rtol=1e-5)
    entropy = MarkovSource.random(5).entropy
    assert (found["test_bits"] > entropy - 0.15).all()  # of 600 tokens
    assert (found["test_bits"] < 0.9 * math.log2(5)).all(), "it has learnt"


def test_own_networks_for_sequences():
    own = recipe(network={"type": "own_code:TokenSum", "width": 6})
    batched, loop = (train_tile(own.replace({"training.engine": e}), 0, device="cpu") for e in ("batched", "loop"))
    np.testing.assert_allclose(batched.weights, loop.weights, rtol=2e-3, atol=1e-5)
    with pytest.raises(UsageError, match=r'own_code:TokenDropout.*use training.engine = "loop"'):
        train_tile(recipe(network={"type": "own_code:TokenDropout"}), 0, device="cpu")
    with pytest.raises(UsageError, match=r"own_code:Cnn is called with \(vocabulary, \*\*numbers\)"):
        train_tile(recipe(network={"type": "own_code:Cnn"}), 0, device="cpu")


@pytest.mark.parametrize("engine", ["batched", "loop"])
@pytest.mark.parametrize("head_start", [1.0, 0.0])
def test_an_own_network_that_reads_later_tokens_is_refused(engine, head_start):
    """It would predict the next token by copying it."""
    network = {"type": "own_code:TokenLookahead", "head_start": head_start}
    with pytest.raises(UsageError, match=r"own_code:TokenLookahead: expected logits that depend on their own and earl"):
        train_tile(recipe(network=network, training__engine=engine), 0, device="cpu")


@pytest.fixture
def text(tmp_path):
    """A folder with a text, and a recipe beside it."""
    folder = tmp_path / "corpus"
    folder.mkdir()
    words = {"train": "the cat sat on the mat . " * 20, "valid": "the mat sat", "test": "a cat sat on"}
    for name, text in words.items():
        (folder / f"{name}.txt").write_text(text)
    data = {"name": "text", "path": "corpus", "length": 5, "train": 16}
    training, population = {"epochs": 1, "batch_size": 4}, {"networks": 2, "tile": 2}
    network = {"type": "mamba", "width": 8, "depth": 1}
    sections = {"network": network, "data": data, "training": training, "population": population}
    (tmp_path / "text.toml").write_text(tomli_w.dumps(sections))
    return tmp_path


def test_text_of_ones_own(text):
    plan = Recipe.load(text / "text.toml")
    population = collect(plan, text / "a.pop", data=text, workers=1, device="cpu", progress=False)
    characters = sorted(set("the cat sat on the mat . "))
    assert population.recipe.data.vocabulary == len(characters)
    assert population.network(0).lm_head.out_features == len(characters)
    source = load(population.recipe.data, text)
    assert isinstance(source, SequenceSource)
    held_out = torch.cat([batch.targets.flatten() for batch in source.held_out[1]])
    assert [characters[i] for i in held_out.tolist()] == list("a cat sat on")[1:]
    network, entropy = population.network(1), torch.nn.CrossEntropyLoss(reduction="sum")
    with torch.no_grad():
        nats = [entropy(network(b.tokens).flatten(0, 1), b.targets.flatten()) for b in source.held_out[1]]
    assert population.metrics["test_loss"][1] == pytest.approx(float(sum(nats)) / 11, rel=1e-5)
    (text / "corpus/test.txt").write_text("a mat")
    with pytest.raises((RecipeError, DataError), match="data text"):
        collect(plan, text / "a.pop", data=text, networks=4, workers=1, device="cpu", progress=False)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("train", None, "expected the files of a text corpus, one of ptb.train.txt"),
        ("test", b" \n ", "test.txt: expected text, found none"),
        ("valid", b"caf\xe9", "valid.txt: cannot be read as text in UTF-8"),
        ("train", b"abc", "data.length: expected less than the 3 tokens of the text, found 5"),
        ("test", b"xyz", "test.txt: the character 'x' is not in the training text"),
    ],
)
def test_damaged_text_is_an_error_of_one_line(file, content, message, text, capsys):
    (text / f"corpus/{file}.txt").unlink()
    if content is not None:
        (text / f"corpus/{file}.txt").write_bytes(content)
    if content == b"abc":
        (text / "corpus/valid.txt").write_bytes(b"ab")
        (text / "corpus/test.txt").write_bytes(b"ab")
    options = ("--data", text, "--workers", 1, "-o", text / "a.pop")
    assert message in error_of("collect", text / "text.toml", *options, capsys=capsys)
    assert not (text / "a.pop").exists()


CONTEXT = NETWORKS["transformer"] | {"context": 20}
MIXER = {"network": {"type": "vit", "width": 8, "depth": 1, "heads": 1}}
SHORT = "network.context: expected at least 24, the tokens of the longest sequence that is evaluated, found 20"
ONE_ANSWER = "data: vocabulary: expected an integer >= 8, found 6 \\(at 2 times"
REFUSED = [
    (MIXER, "network.type: vit takes images, copy has sequences"),
    ({"data": {"name": "digits"}}, "network.type: mamba takes sequences, digits has images"),
    ({"data__lengths": [2, 4]}, r"lengths: expected 1 and then growing multiples of it, found \[2, 4\]"),
    ({"data__name": "sort"}, ONE_ANSWER),
    ({"data__name": "associative_recall"}, "data: length: expected an even number"),
    ({"data__shortest": 4}, "data: shortest: expected at most the length, 3, found 4"),
    (
        {"data__context": 5},
        "data: context: expected at least 6, the tokens of the longest string with its ans.*found 5",
    ),
    ({"data__name": "sort", "data__lengths": [1], "data__vocabulary": 4, "data__stop": True}, "found 3, besides the"),
    ({"data__context": 40, "network": CONTEXT}, "network.context: expected at least 40"),
    ({"training__mixup": 0.5}, "training.mixup applies to images"),
    ({"network": CONTEXT}, SHORT),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED)
def test_recipes_that_cannot_be(changes, message):
    with pytest.raises(RecipeError, match=message):
        recipe(**changes)


@pytest.mark.parametrize("name", TASKS)
def test_the_least_vocabulary_is_the_first_with_which_answers_differ(name):
    """Counted over sequences."""

    def answers(length, vocabulary):
        found = TASKS[name](torch.Generator().manual_seed(0), 64, length, vocabulary)
        return len(found.targets[:, found.mask[0]].unique(dim=0))

    for length in (4, 8):  # of 2 tokens, the least for recall has one key, and of 3 none
        least = TASK_SIZES[name].vocabulary(length)
        assert answers(length, least) > 1
        if name != "associative_recall":
            assert answers(length, least - 1) == 1


def test_held_out_sequences_are_the_same_for_all_populations_and_not_those_of_training():
    first, other = (load(recipe(population__seed=seed, data__test=50).data) for seed in (0, 1))
    assert first.fingerprint == other.fingerprint
    assert first.fingerprint != load(recipe(data__test=51).data).fingerprint
    assert first.fingerprint == load(recipe(data__test=50, data__train=7).data).fingerprint
    # no stream of a population's networks is that of the held-out sequences
    for root in range(3):
        for k in range(5):
            assert torch_seed(root, k, Purpose.SEQUENCES) != torch_seed(0, 1, Purpose.HELD_OUT)


@pytest.mark.parametrize("engine", ["batched", "loop"])
def test_snapshots_count_steps(engine, tmp_path):
    """Six steps are an epoch: with a constant rate, step 6 is the end of a training of one epoch."""
    changes = {"training__schedule": "constant", "training__warmup": 0.0, "training__engine": engine}
    plan = recipe(**changes)
    found = train_tile(plan.replace({"population.snapshots": [0, 4, 6, 12]}), 1)
    assert found.snapshots.shape[:2] == (2, 4)
    _, fourth, sixth, last = found.snapshots.swapaxes(0, 1)
    assert train_tile(plan, 1).weights.tobytes() == found.weights.tobytes() == last.tobytes()
    assert train_tile(plan.replace({"training.epochs": 1}), 1).weights.tobytes() == sixth.tobytes()
    assert np.abs(fourth - sixth).max() > 1e-3
    with pytest.raises(RecipeError, match=r"snapshots: expected at most 12, the last step of training, found \[13\]"):
        collect(recipe(population__snapshots=[13]), tmp_path / "a.pop")
    with pytest.raises(RecipeError, match=r"population.snapshots: expected ascending numbers"):
        recipe(population__snapshots=[4, 4])


@pytest.mark.slow
def test_other_strings_of_a_study_have_the_tokens_of_the_training_data(tmp_path, monkeypatch):
    """From the stream of the held-out strings, with begin and stop tokens, accuracies are those that were stored."""
    study = script("analyses/copying/other_strings.py")
    small = {"data.train": 8, "data.test": 4, "training.epochs": 1, "network.width": 8, "network.state": 4}
    packed = Recipe.load(ROOT / "analyses/copying/mamba2/recipe.toml").replace({**small, "population.networks": 2})
    population = collect(packed, tmp_path / "packed.pop", workers=1, progress=False, device="cpu")
    for multiple, name in ((1, "test_accuracy"), (2, "test_accuracy_2x")):
        monkeypatch.setattr(study, "SEED", torch_seed(0, multiple, Purpose.HELD_OUT))
        found = study.accuracies(population, 4, multiple).mean(1)
        assert found == pytest.approx(100 * population.metrics[name], abs=1e-4)
        assert found.max() > 0
    markov = Recipe.parse({**BASE, "data": {"name": "markov", "vocabulary": 6, "length": 4, "train": 4, "test": 2}})
    population = collect(markov, tmp_path / "markov.pop", workers=1, progress=False)
    with pytest.raises(UsageError, match="a generated task"):
        study.accuracies(population, 4, 1)
