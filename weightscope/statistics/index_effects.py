"""Whether weights are exchangeable by distribution: does the mean or the variance of an entry depend on its index?

A network computes the same function when its units are renumbered. Whether all units also have the same distribution
after training depends on where training starts: sinusoidal positions, for example, tell channels apart.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from weightscope._util.names import joined
from weightscope.statistics.permutations import PermutationSpec, bare, is_signed

NETWORKS = 1024  # of a population that are tested at most
_BUNDLES = 64  # sums of networks that are kept
_COPIES = 256  # fixed entries of a tensor that are tested at most: an embedding of a vocabulary has more
_EXCEEDING = 20  # permutations with a larger statistic after which a group is not looked at any longer
_ENTRIES = 1 << 21  # of permuted sums at a time


@dataclass(frozen=True)
class IndexEffect:
    """How much the distribution of a group's units depends on their index."""

    group: str
    largest: str  # the mean or variance with the largest F: "mean of blocks.0.norm1.weight"
    f: float  # between indices over within, 1 on average by chance
    chance: float  # what the largest F of the group's tensors stays below in 95 % of the permutations
    p: float  # adjusted for the number of groups (Holm 1979)
    beyond: dict[str, float]  # F of all means and variances above `chance`, largest first
    networks: int  # that were tested, at most `NETWORKS`; of a population in parts those of its first part


def described(effects: Sequence[IndexEffect], level: float = 0.05) -> str:
    """One line: which groups are not exchangeable by distribution; empty if no group was tested."""
    if not effects:
        return ""
    failing = sorted((e for e in effects if e.p < level), key=lambda e: -e.f)
    number = f"{len(effects)} group{'s' * (len(effects) > 1)} of units"
    if not failing:
        tested = f"permutation test of {effects[0].networks:,} networks, p >= {level:g}"
        return f"by distribution, no effect of the index is shown in {number} ({tested})"
    shown = [
        f"{e.group} ({e.largest}: F = {e.f:.1f}, chance {e.chance:.1f}, p <= {e.p:.2g}; "
        f"{len(e.beyond)} means and variances beyond chance)"
        for e in failing
    ]
    return f"not exchangeable by distribution, {len(failing)} of {number}: {joined(shown, 4)}"


class IndexEffects:
    """A streaming permutation test of each group of units.

    For the units i of a group and each tensor with them, network k has x_ki, the mean of the entries of unit i, and
    v_ki, their mean square about the tensor's mean, over the network's average of it. With S_i the sum of either over
    N networks, centred over i, F is that of a one-way analysis of variance,

        F = (sum_i S_i^2 / N) / ((sum_ki x_ki^2 - sum_i S_i^2 / N) / (N - 1)),

    and a group's statistic is the largest F of its tensors. Under the null hypothesis a network that is renumbered is
    as likely as it was before, and networks are independent, so the units of each network are renumbered at random (a
    signed group's signs flip, too; units of attention heads stay together). Of more than 64 networks, the sums of every
    64th are renumbered as one, which is as exact, so memory does not depend on N. P-values are sequential (Besag and
    Clifford 1991, "Sequential Monte Carlo p-values").

    Units that must stay where they are, or whose heads are not known, are only tried for signs. What is the same in all
    networks (fixed positions) is no sample and is not tested.

    Source: Fisher's randomisation test; Holm 1979 over groups.
    """

    def __init__(self, permutations: PermutationSpec) -> None:
        self.permutations, self.n = permutations, 0
        self._sums: dict[str, dict[tuple[str, str, bool], np.ndarray]] = {group: {} for group in permutations.sizes}
        self._first: dict[tuple[str, ...], np.ndarray] = {}  # values of the first network
        self._varying: set[tuple[str, ...]] = set()

    def update(self, views: Mapping[str, np.ndarray]) -> None:
        """Take up networks: view name -> (n, *shape)."""
        left = NETWORKS - self.n
        count = min(left, len(next(iter(views.values()))))
        if count <= 0:
            return
        bundle = (self.n + np.arange(count)) % _BUNDLES
        self.n += count
        for view in self.permutations.views:
            permuted = [i for i, label in enumerate(view.axes, 1) if label is not None]
            array = views[view.name][:count]
            unsigned = not any(map(is_signed, view.labels))
            square = (array - array.mean(axis=tuple(permuted), keepdims=True) if unsigned else array) ** 2
            for i in permuted:
                label, others = str(view.axes[i - 1]), tuple(j for j in permuted if j != i)
                name = view.name if view.axes.index(label) == i - 1 else f"{view.name} (axis {i - 1})"
                mean = np.moveaxis(array.mean(axis=others, keepdims=True), i, 1).reshape(count, array.shape[i], -1)
                mean = mean[..., :_COPIES] if is_signed(label) else _centred(mean[..., :_COPIES])
                spread = square.mean(axis=tuple(j for j in range(1, array.ndim) if j != i))[..., None]
                average = spread.mean(axis=1, keepdims=True)
                spread = _centred(np.divide(spread, average, out=np.zeros_like(spread), where=average > 0))
                kept = self._sums[bare(label)]
                for key, values in (("mean", is_signed(label)), mean), (("variance", False), spread):
                    sums = kept.setdefault((name, *key), np.zeros((_BUNDLES, *values.shape[1:])))
                    np.add.at(sums, bundle, values)
                    first = self._first.setdefault((label, name, key[0]), values[0])
                    what = bare(label), name, key[0]
                    if what not in self._varying and not np.allclose(values, first, rtol=1e-9, atol=0):
                        self._varying.add(what)

    def effects(self, seed: int = 0) -> tuple[IndexEffect, ...]:
        """One for each group that could be tested, in the specification's order; none with a single network."""
        bundles = min(self.n, _BUNDLES)
        if bundles < 2:
            return ()
        rng = np.random.default_rng(seed)
        rounds = max(999, 40 * len(self._sums))
        found = [e for group in self._sums if (e := self._tested(group, bundles, rounds, rng)) is not None]
        return tuple(replace(e, p=p) for e, p in zip(found, holm([e.p for e in found]), strict=True))

    def _tested(self, group: str, bundles: int, rounds: int, rng: np.random.Generator) -> IndexEffect | None:
        # whether each unit keeps its place, so that at most its sign may change
        stays = self.permutations.heads.get(group) == (None, self.permutations.sizes[group])
        tested = [k for k in self._sums[group] if (group, *k[:2]) in self._varying and (k[2] or not stays)]
        sums = {key: x[:bundles] for key in tested if (x := self._sums[group][key]).any()}
        if not sums:
            return None
        keys = sorted(sums, key=lambda key: key[2])  # those that change sign last
        data = np.concatenate([sums[key] for key in keys], axis=-1)  # (B, n, C)
        widths = [sums[key].shape[-1] for key in keys]
        starts, unsigned = (
            np.cumsum([0, *widths[:-1]]),
            sum(w for w, key in zip(widths, keys, strict=True) if not key[2]),
        )
        total = np.add.reduceat(np.square(data).sum(axis=(0, 1)), starts)

        def statistics(summed: np.ndarray) -> np.ndarray:
            """F (..., tensors) of sums over networks (..., n, C)."""
            between = np.add.reduceat(np.square(summed).sum(axis=-2), starts, axis=-1) / bundles
            within = np.maximum(total - between, 1e-12 * total)
            return between * (bundles - 1) / within

        observed = statistics(data.sum(axis=0))
        largest, chance = float(observed.max()), np.empty(0)
        for orders, signs in self._elements(group, bundles, rounds, data.shape[1] * data.shape[2], rng):
            summed = np.zeros((len(orders), *data.shape[1:]))
            for b in range(bundles):
                moved = data[b][orders[:, b]]
                moved[..., unsigned:] *= signs[:, b, :, None]
                summed += moved
            chance = np.append(chance, statistics(summed).max(axis=-1))
            exceeding = np.flatnonzero(chance >= largest * (1 - 1e-9))
            if len(exceeding) >= _EXCEEDING:
                break
        early = len(exceeding) >= _EXCEEDING
        p = _EXCEEDING / (exceeding[_EXCEEDING - 1] + 1) if early else (len(exceeding) + 1) / (len(chance) + 1)
        level = float(np.quantile(chance, 0.95))
        order = observed.argsort()[::-1]
        named = {f"{keys[i][1]} of {keys[i][0]}": float(observed[i]) for i in order}
        beyond = {name: f for name, f in named.items() if f > level}
        return IndexEffect(group, next(iter(named)), largest, level, float(p), beyond, self.n)

    def _elements(
        self, group: str, bundles: int, rounds: int, entries: int, rng: np.random.Generator
    ) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Permutations (R, B, n) and signs (R, B, n) of the units, `rounds` in all."""
        n = self.permutations.sizes[group]
        name, heads = self.permutations.heads.get(group, (group, 1))
        size = min(100, max(1, _ENTRIES // entries))
        for start in range(0, rounds, size):
            shape = min(size, rounds - start), bundles
            within = rng.random((*shape, heads, n // heads)).argsort(axis=-1)
            outer = np.arange(heads) if name is None else rng.random((*shape, heads)).argsort(axis=-1)
            orders = (outer[..., None] * (n // heads) + within).reshape(*shape, n)
            yield orders, rng.choice([-1.0, 1.0], orders.shape)


def _centred(values: np.ndarray) -> np.ndarray:
    return values - values.mean(axis=1, keepdims=True)


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's step-down adjustment (1979) of m p-values, in their order: max over j <= i of (m - j) p_(j), at most 1."""
    adjusted, running = [0.0] * len(p_values), 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=lambda i: p_values[i])):
        running = max(running, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = running
    return adjusted
