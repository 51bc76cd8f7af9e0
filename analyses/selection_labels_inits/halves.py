"""CIFAR-10 in two halves that share no class: `a` has the first five, `b` the others, with labels from 0 to 4."""

from functools import cache

from weightscope.data.dataset import Dataset, load


@cache
def whole() -> Dataset:
    """CIFAR-10, from ./data or the folder named by WEIGHTSCOPE_DATA."""
    return load("cifar10")


def half(first: int) -> Dataset:
    """Images and labels of the classes first to first + 4."""
    data = whole()
    train, test = (labels // 5 == first // 5 for labels in (data.train_labels, data.test_labels))
    train_labels, test_labels = data.train_labels[train] - first, data.test_labels[test] - first
    return Dataset.from_arrays(data.train_images[train], train_labels, data.test_images[test], test_labels)


def a() -> Dataset:
    """Airplane, automobile, bird, cat, deer."""
    return half(0)


def b() -> Dataset:
    """Dog, frog, horse, ship, truck."""
    return half(5)
