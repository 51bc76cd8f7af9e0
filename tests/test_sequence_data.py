"""Generated tasks against a brute-force solver, text files, and the Markov source against its entropy."""

import math
from pathlib import Path

import numpy as np
import pytest
import references_sequences as reference
import torch
from families import seeded

from weightscope.data.sequence_config import TaskConfig
from weightscope.data.sequences import TASKS, GeneratedTask, MarkovSource, Text, accuracy, cross_entropy
from weightscope.errors import UsageError

LENGTH, VOCABULARY, BATCH = 10, 26, 64


@pytest.mark.parametrize("task", sorted(TASKS))
def test_answers_are_those_of_the_solver(task):
    found = TASKS[task](seeded(), BATCH, LENGTH, VOCABULARY)
    assert all(map(torch.equal, found, TASKS[task](seeded(), BATCH, LENGTH, VOCABULARY)))
    assert not torch.equal(found.tokens, TASKS[task](seeded(1), BATCH, LENGTH, VOCABULARY).tokens)
    assert found.tokens.dtype == found.targets.dtype == torch.int64
    assert torch.equal(found.tokens[:, 1:], found.targets[:, :-1])
    whole = torch.cat([found.tokens, found.targets[:, -1:]], 1)
    assert whole.min() >= 0
    assert whole.max() == VOCABULARY - 1
    for row, mask in zip(whole.tolist(), found.mask.tolist(), strict=True):
        string, separator, asked = row[:LENGTH], row[LENGTH], row[LENGTH + 1 :]
        assert separator == VOCABULARY - 1
        assert separator not in string + asked
        expected = reference.answer(task, string, VOCABULARY, asked)
        assert len(asked) == len(expected)
        assert all(mine == theirs for mine, theirs in zip(asked, expected, strict=True) if theirs is not None)
        assert mask == [False] * LENGTH + [token is not None for token in expected]


@pytest.mark.parametrize("context", [None, 30])
@pytest.mark.parametrize("task", sorted(TASKS))
def test_packed_contexts_are_read_token_by_token(task, context):
    """`$ string | answer .` again and again, of uniform lengths (chi-squared, false alarm 1e-6); what is cut is not
    scored."""
    from scipy.stats import chisquare

    sizes = {"shortest": 2, "length": 6, "context": context, "vocabulary": 20, "lengths": (1,)}
    corpus = GeneratedTask(TaskConfig(name=task, begin=True, stop=True, **sizes))
    stored = corpus.compact(seeded(), 2000, 6)
    whole, lengths = corpus.expanded(stored, 6), []
    assert whole.shape == (2000, corpus.config.trained + 1)
    for row, scored in zip(whole.tolist(), (stored < 0).tolist(), strict=True):
        begins, expected = [i for i, token in enumerate(row) if token == 19], []  # 17 is `|`, 18 `.`
        assert begins[0] == 0
        for start, end in zip(begins, [*begins[1:], len(row)], strict=True):
            part = row[start + 1 : end]
            if 18 not in part:  # cut, or padding
                expected += [False] * (end - start)
                continue
            string, asked = part[: part.index(17)], part[part.index(17) + 1 : part.index(18)]
            answer = reference.answer(task, string, 18, asked)
            assert all(mine == theirs for mine, theirs in zip(asked, answer, strict=True) if theirs is not None)
            expected += [False] * (len(string) + 2) + [token is not None for token in answer] + [True]
            lengths += [len(string)] if start == 0 else []
        assert scored == expected
    kinds, counts = np.unique(lengths, return_counts=True)
    assert kinds.tolist() == list(range(2, 7, 2 if task == "associative_recall" else 1))
    assert len(lengths) == 2000
    assert chisquare(counts).pvalue > 1e-6


@pytest.mark.parametrize("task", sorted(TASKS))
def test_tokens_of_the_strings_are_uniform(task):
    """Counts of each possible token against their expectation, chi-squared below its 1 - 1e-6 quantile; fixed seed."""
    from scipy.stats import chi2

    found = TASKS[task](seeded(), 4000, LENGTH, VOCABULARY).tokens[:, :LENGTH]
    if task == "associative_recall":
        found = found[:, ::2]
    if task == "selective_copy":
        assert ((found == VOCABULARY - 2).sum(1) == 7).all()  # 3 of 10 are not blank
        found = found[found != VOCABULARY - 2]
    counts = torch.bincount(found.flatten()).double()
    expected = found.numel() / len(counts)
    assert len(counts) == {"associative_recall": 12, "selective_copy": 24}.get(task, 25)
    assert float(((counts - expected) ** 2 / expected).sum()) < chi2.isf(1e-6, len(counts) - 1)


def test_all_keys_are_asked_for_in_random_order():
    found = TASKS["associative_recall"](seeded(), BATCH, LENGTH, VOCABULARY)
    keys, asked = found.tokens[:, :LENGTH:2], found.tokens[:, LENGTH + 1 :: 2]
    assert torch.equal(keys.sort(1).values, asked.sort(1).values)
    assert not torch.equal(keys, asked)


@pytest.mark.parametrize(
    ("task", "length", "vocabulary", "match"),
    [
        ("copy", 3, 2, "vocabulary: expected an integer >= 3, found 2"),
        ("sort", 5, 6, "vocabulary: expected an integer >= 7, found 6"),
        ("associative_recall", 6, 6, "vocabulary: expected an integer >= 7, found 6"),
        ("associative_recall", 5, 20, "expected an even number, two tokens for each pair, found 5"),
        ("selective_copy", 5, 3, "vocabulary: expected an integer >= 4, found 3"),
    ],
)
def test_wrong_sizes_are_refused(task, length, vocabulary, match):
    with pytest.raises(ValueError, match=match):
        TaskConfig(name=task, length=length, vocabulary=vocabulary, lengths=(1,))


def test_metrics_count_the_answer_only():
    found = TASKS["copy"](seeded(), 2, 3, 5)
    logits = torch.nn.functional.one_hot(found.targets, 5).double() * 50
    logits[:, :3] = 0  # the string itself cannot be predicted, and is not scored
    assert accuracy(logits, found) == 1
    assert float(cross_entropy(logits, found)) < 1e-12
    logits[0, 3] = logits[0, 3].roll(1)
    assert accuracy(logits, found) == pytest.approx(5 / 6)
    assert float(cross_entropy(torch.zeros(2, 6, 5), found)) == pytest.approx(math.log(5))


def test_the_markov_source_has_the_stated_entropy():
    """-log2 p of 200,000 tokens, within 5 standard errors of the entropy: false alarm 6e-7."""
    source = MarkovSource.random(12, seed=1)
    found = source.batch(seeded(), 400, 500)
    surprise = -np.log2(source.transitions)[found.tokens.numpy(), found.targets.numpy()].mean(1)  # independent rows
    assert abs(surprise.mean() - source.entropy) < 5 * surprise.std() / len(surprise) ** 0.5
    assert 1 < source.entropy < math.log2(12) - 0.5
    first = np.bincount(found.tokens[:, 0].numpy(), minlength=12) / 400
    assert abs(first - source.stationary).max() < 5 * 0.5 / 400**0.5


def test_a_uniform_source_has_the_largest_entropy():
    assert MarkovSource(np.full((8, 8), 1 / 8)).entropy == pytest.approx(3)


def _corpus(folder: Path, train: str, valid: str, test: str, names=("train.txt", "valid.txt", "test.txt")) -> Path:
    for name, text in zip(names, (train, valid, test), strict=True):
        (folder / name).write_text(text, encoding="utf-8")
    return folder


def test_text_of_characters_and_words(tmp_path):
    folder = _corpus(
        tmp_path,
        "the café\nthe <unk> cat\n",
        "the cat\n",
        "a dog\n",
        ("ptb.train.txt", "ptb.valid.txt", "ptb.test.txt"),
    )
    words = Text.read(folder, "word")
    assert words.units == ("<eos>", "<unk>", "café", "cat", "the")
    assert words.train.tolist() == [4, 2, 0, 4, 1, 3, 0]
    assert words.test.tolist() == [1, 1, 0]
    (tmp_path / "ptb.test.txt").write_text("cat the\n")
    characters = Text.read(folder, "character")
    assert "".join(characters.units[i] for i in characters.train) == "the café\nthe <unk> cat\n"
    assert characters.vocabulary == len(set("the café\nthe <unk> cat\n"))


def test_characters_of_penn_treebank_are_separated_by_spaces(tmp_path):
    """The word `a cat` is `a _ c a t` in the files for characters, which words are not read from."""
    _corpus(tmp_path, "a cat\n", "a\n", "cat\n", ("ptb.train.txt", "ptb.valid.txt", "ptb.test.txt"))
    names = ("ptb.char.train.txt", "ptb.char.valid.txt", "ptb.char.test.txt")
    _corpus(tmp_path, " a _ c a t \n c a t \n", " a \n", " t _ c \n", names)
    characters, words = Text.read(tmp_path, "character"), Text.read(tmp_path, "word")
    assert characters.units == ("<eos>", "_", "a", "c", "t")
    assert characters.train.tolist() == [2, 1, 3, 2, 4, 0, 3, 2, 4, 0]
    assert characters.test.tolist() == [4, 1, 3, 0]
    assert words.units == ("<eos>", "a", "cat")


def test_windows_of_text(tmp_path):
    text = Text.read(_corpus(tmp_path, "abcdefghij" * 3, "abcdefg", "ab"), "character")
    found = text.batch(seeded(), 50, 29)
    assert set(found.tokens[:, 0].tolist()) == {0}  # the only window of 29 tokens and the one that follows
    found = text.batch(seeded(), 200, 4)
    assert torch.equal((found.tokens + 1) % 10, found.targets)
    assert len(found.tokens[:, 0].unique()) == 10
    held = list(text.held_out(4))
    assert [part.targets[0].tolist() for part in held] == [[1, 2, 3, 4], [5, 6]]
    with pytest.raises(UsageError, match="expected less than the 30 tokens of the text, found 30"):
        text.batch(seeded(), 1, 30)
