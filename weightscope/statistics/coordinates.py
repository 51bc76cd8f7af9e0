"""`Coordinates`: the selected and computed coordinates of a network, from raw weight vectors to columns."""

from collections.abc import Sequence

import numpy as np

from weightscope.spec import WeightSpec
from weightscope.statistics.computed import Computed, parse
from weightscope.statistics.folding import fold, needed_for_folding, norm_pairs


class Coordinates:
    """The selected tensors, with norms folded on request, followed by computed coordinates.

    Args:
        spec: of the whole network.
        select: patterns as in `WeightSpec.select`; None for computed coordinates only.
        computed: expressions (see `weightscope.statistics.computed`), evaluated after folding.
        fold_norms: fold the gain and bias of each normalisation layer into the next linear map.

    Attributes:
        spec: of the result; computed coordinates are tensors named by their expression.
        reads: the sub-spec of the tensors that must be read.
        folded: whether norms are folded.

    Raises:
        UsageError: if a pattern or an expression matches nothing.
        SpecError: if norms cannot be folded.
    """

    def __init__(
        self,
        spec: WeightSpec,
        select: str | Sequence[str] | None = "*",
        *,
        computed: Sequence[str] = (),
        fold_norms: bool = False,
    ) -> None:
        self._plain = WeightSpec([]) if select is None else spec.select(select)
        self._computed: tuple[Computed, ...] = tuple(c for text in computed for c in parse(text, spec))
        names = {*self._plain.names, *(name for c in self._computed for name in c.tensors)}
        self.folded = fold_norms
        self._pairs = norm_pairs(spec) if fold_norms else ()
        needed = needed_for_folding(names, spec, self._pairs)
        self.reads = WeightSpec(t for t in spec.tensors if t.name in needed)
        self.spec = WeightSpec([*self._plain.tensors, *(c.tensor_spec(spec) for c in self._computed)])

    def __call__(self, rows: np.ndarray) -> np.ndarray:
        """The coordinates of networks.

        Args:
            rows: (N, reads.size), the tensors of `reads` in their order.

        Returns:
            (N, spec.size); `rows` itself if nothing is computed or folded.
        """
        if self.spec == self.reads and not self._pairs:
            return rows
        # Non-finite networks give non-finite rows, which are counted later.
        with np.errstate(all="ignore"):
            tensors = fold(self.reads.unpack(rows), self._pairs)
            parts = [tensors[name] for name in self._plain.names] + [c(tensors) for c in self._computed]
        return np.concatenate([part.reshape(len(rows), -1) for part in parts], axis=1)
