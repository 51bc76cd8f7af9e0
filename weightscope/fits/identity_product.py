"""Alpha and beta of `mimetic_attention_` from a network's products of queries and keys, values and outputs."""

import math
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Literal, get_args

import numpy as np
import torch
from pydantic import BaseModel
from torch import Tensor

from weightscope._util.checks import choice
from weightscope._util.results import row_table
from weightscope._util.threads import one_thread
from weightscope.anatomy import named_tensors, self_attention
from weightscope.anatomy.attention_part import NO_PRODUCT, NOTES, PartName
from weightscope.anatomy.factored_products import FactoredProduct
from weightscope.errors import AnatomyError, DataError
from weightscope.fits.artifact import NetworkFit


class ProductNumbers(BaseModel):
    """Numbers of `mimetic_attention_` for the product M of one layer, mean over its heads.

    `beta` has the sign of the product, as `weightscope products` shows it; `beta_vo` of `mimetic_attention_` is minus
    the `beta` of values and outputs.
    """

    alpha: float  # of the noise
    beta: float  # of the diagonal
    beta_std: float  # standard deviation of the heads' beta
    diagonal: float  # the diagonal mean of the product, `tr M / d`, smaller than beta because of its rank
    noise: float  # the least-squares alpha of the product, `|M - diagonal I|_F / sqrt(d)`
    r2: float  # `d diagonal^2 / |M|_F^2`, the identity's share of the product; at most rank / d
    attainable: float  # rank / d
    # `|s - s'| / |s|` between the singular values of M and those of the initialiser's products
    residual: float


class ProductLayer(BaseModel):
    """One self-attention module; `depth` is relative, in [0, 1]."""

    name: str
    depth: float
    width: int
    heads: int
    qk: ProductNumbers
    vo: ProductNumbers


_EACH = {"alpha": ".3f", "beta": "+.3f", "(std)": ".3f", "R2": ".4f", "of": ".4f", "spectrum": ".2f"}
_KEYS = dict(zip(_EACH, ("alpha", "beta", "beta_std", "r2", "attainable", "residual"), strict=True))
_COLUMNS = {"layer": "{name}", "depth": "{depth:.3f}"} | {
    f"{part} {head}": f"{{{part}.{_KEYS[head]}:{form}}}" for part in ("qk", "vo") for head, form in _EACH.items()
}
_NOTES = {
    "none": "",
    "folded": "\nLayerScale is folded into W_V W_O",
    "left out": "\nwarning: LayerScale multiplies each channel of W_V W_O and may change its sign; the option "
    "fold_scales=true includes it",
}


class ProductFit(NetworkFit):
    """`W_Q W_K^T ~ alpha Z + beta I` and `W_V W_O ~ alpha Z + beta I`, layer by layer."""

    structure: Literal["identity_product"] = "identity_product"
    signs: Literal["products"]  # beta has the sign of the product, also for values and outputs
    parts: Literal["both", "qk", "vo"] = "both"  # the products that the initialiser sets
    layer_scale: Literal["none", "folded", "left out"] = "none"  # after the attention; folded into W_V W_O, or not
    layers: tuple[ProductLayer, ...]

    def rows(self) -> list[dict[str, Any]]:
        """One row for each layer and product: `name`, `depth`, `width`, `heads`, `part` and the product's numbers."""
        each = ((layer, layer.model_dump(exclude={"qk", "vo"})) for layer in self.layers)
        return [about | {"part": p} | getattr(layer, p).model_dump() for layer, about in each for p in ("qk", "vo")]

    def report(self) -> str:
        return (
            f"mimetic_attention_ with these numbers, parts {self.parts}\n"
            "beta has the sign of the product, as in `products`; beta_vo of mimetic_attention_ is minus that\n"
            "R2 is the identity's share of the product, 'of' the most that its rank allows, 'spectrum' the relative "
            f"residual of its singular values{_NOTES[self.layer_scale]}\n"
            + "".join(f"left out: {layer}\n" for layer in self.left_out)
            + "\n"
            f"{row_table(_COLUMNS, [dict(layer) for layer in self.layers])}"
        )


_SIZE = 192  # width of the simulated products, which shows the limit of all widths to about 1 %
_DRAWS = 4
_ANGLES = 33
_SEED = 0x5EED


@one_thread()
def fit_identity_product(
    source: Any, *, parts: str = "both", fold_scales: bool = False, config: Mapping[str, Any] | None = None
) -> ProductFit:
    """The alpha and beta of `mimetic_attention_` whose products look like a network's, layer by layer.

        queries and keys     W_Q W_K^T ~ alpha Z + beta I    per head, then the mean over heads
        values and outputs   sum_h W_V W_O ~ alpha Z + beta I    per layer

    A product of rank r < d cannot be `alpha Z + beta I`; `mimetic_attention_` takes its best part of rank r. So alpha
    and beta are those for which that part has the product's own diagonal mean `tr M / d` and norm `|M|_F`: two
    equations in two unknowns, solved by a table of simulated products with the same r / d and number of query heads
    for each key head. For r = d they are the least-squares ones, `beta = tr M / d` and
    `alpha = |M - beta I|_F / sqrt(d)`; the artifact holds both kinds.

    Goodness of fit: `R2 = d (tr M / d)^2 / |M|_F^2`, the share of the squared norm that the identity explains, at
    most r / d; and the relative residual `|s - s'| / |s|` between the singular values of M and those of the
    initialiser's products.

    Biases, normalisation gains and position rotations are ignored: the numbers describe weights. For rotary models the
    product is that at relative position 0. `parts` ("both", "qk" or "vo") are the products that the initialiser will
    set. `fold_scales` fits `sum_h W_V W_O diag(s)` where a layer has a LayerScale s, which changes what the layer adds
    to the residual stream, including its sign; fold it for target networks without LayerScale. `config` is the model's,
    for tensors without one: `{"num_attention_heads": 6}` is enough.

    Source: thesis Eq. 3.12-3.18, whose alpha and beta were found by grid search (3.2.4).

    Example:
        >>> fit_identity_product("hf://facebook/dinov2-small").layers[0].qk.beta
        0.9
    """
    choice("parts", parts, ("both", "qk", "vo"))
    network = named_tensors(source, config)
    found = self_attention(network, strict=None)
    scales = [part.layer_scale for part in found]
    if fold_scales and not any(scales):
        raise AnatomyError(f"`{found[0].name}`: no LayerScale to fold has a known name, here or in another layer")
    layers = []
    left_out = [f"{unread.name} {unread.why}" for unread in found.unread]
    lost = {unread.layer for unread in found.unread if unread.layer is not None}
    known = sorted(lost | {part.layer for part in found})
    for part in found:
        if notes := [NOTES[note] for note in NO_PRODUCT if note in part.notes and parts != "qk"]:
            left_out.append(f"{part.name} {notes[0]}")
            continue
        # (H, d, r), (kv, d, r), (kv, d, r), (H, r, d)
        q, k, v, o = (_finite(part.parameters[name][0], part.read(name)) for name in get_args(PartName))
        group = part.heads // part.kv_heads
        values = v.permute(1, 0, 2).reshape(v.shape[1], -1)
        outputs = o.reshape(part.kv_heads, group, *o.shape[1:]).sum(1).reshape(-1, o.shape[2]).T
        if fold_scales and (scale := part.layer_scale_factors()) is not None:
            outputs = outputs * _finite(getattr(part.layer_scale, "name", part.name), scale)[:, None]
        heads = range(part.heads)
        qk = [_fitted(q[h], k[part.kv_head(h)], group, f"`{part.name}` head {h}") for h in heads]
        vo = [_fitted(values, outputs, 1, f"`{part.name}` values and outputs")]
        depth, sizes = known.index(part.layer) / max(1, len(known) - 1), {"width": part.width, "heads": part.heads}
        layers.append(ProductLayer(name=part.name, depth=depth, **sizes, qk=_joined(qk), vo=_joined(vo)))
    state = "none" if not any(scales) else "folded" if fold_scales else "left out"
    numbers: dict[str, Any] = {"parts": parts, "layer_scale": state, "left_out": tuple(left_out)}
    return ProductFit(signs="products", layers=tuple(layers), **numbers)


def _finite(name: str, value: Tensor) -> Tensor:
    value = value.cpu().double()
    if bad := int((~value.isfinite()).sum()):
        raise DataError(
            f"`{name}`: {bad} of {value.numel()} weights are NaN or infinite; "
            "products need a network that did not diverge"
        )
    return value


def _joined(fits: list[dict[str, float]]) -> ProductNumbers:
    """The mean over heads, and the spread of beta."""
    means = {key: float(np.mean([fit[key] for fit in fits])) for key in fits[0]}
    return ProductNumbers(**means, beta_std=float(np.std([fit["beta"] for fit in fits])))


def _fitted(a: Tensor, b: Tensor, group: int, where: str) -> dict[str, float]:
    """The numbers of one product `A B^T` of factors (d, r)."""
    d, r = a.shape[0], min(a.shape)
    product = FactoredProduct(a, b)
    found = product.statistics()
    diagonal, noise = float(found["diagonal_mean"]), float(found["alpha"])
    norm = math.hypot(diagonal, noise)  # |M|_F / sqrt(d)
    if norm == 0:
        raise DataError(f"{where}: the product is zero; there is nothing to fit")
    limits = _limits(group)
    alpha, beta = limits.solve(diagonal / norm, r / d)
    spectrum = limits.spectrum(alpha, beta, r, r / d)
    values = product.singular_values().numpy() / (norm * math.sqrt(d))
    return {
        "alpha": norm * alpha,
        "beta": norm * beta,
        "diagonal": diagonal,
        "noise": noise,
        "r2": min(1.0, (diagonal / norm) ** 2),
        "attainable": r / d,
        "residual": float(np.linalg.norm(values - spectrum) / np.linalg.norm(values)),
    }


class _Limits:
    """Best parts of rank r of `cos(t) Z + sin(t) I` for angles t from 0 to 90 degrees, in the limit of large d.

    `group` products are stacked and share a factor (query heads of one key head). For G angles and each rank r of n,
    `trace` is `tr M_r / d` and `square` is `|M_r|_F^2 / d`, both (G, n + 1); `first` has for each angle the factor
    (n, n) whose first r columns have the singular values of the first product's part of rank r.
    """

    def __init__(self, group: int) -> None:
        self.size = n = _SIZE if group == 1 else _SIZE // 2
        self.angles = np.linspace(0, math.pi / 2, _ANGLES)
        g = torch.Generator().manual_seed(_SEED)
        eye = torch.eye(n, dtype=torch.float64).repeat(group, 1)
        noises = [torch.randn(group * n, n, generator=g, dtype=torch.float64) / math.sqrt(n) for _ in range(_DRAWS)]
        tables = np.zeros((2, _ANGLES, n + 1))
        self.first = []
        for i, angle in enumerate(self.angles[:-1]):
            for draw, z in enumerate(noises):
                u, s, vh = torch.linalg.svd(math.cos(angle) * z + math.sin(angle) * eye, full_matrices=False)
                overlaps = s * torch.einsum("ir,ri->r", eye.T @ u, vh)
                for table, part in zip(tables, (overlaps, s.square()), strict=True):
                    table[i, 1:] += part.cumsum(0).numpy() / (n * group * _DRAWS)
                if not draw:
                    self.first.append(u[:n] * s)
        tables[0, 0] = 0  # without an identity the trace is chance
        tables[:, -1] = np.linspace(0, 1, n + 1)  # without noise any r directions are as good as any other
        self.first.append(torch.eye(n, dtype=torch.float64))
        self.trace, self.square = tables

    def _at(self, table: np.ndarray, share: float) -> np.ndarray:
        """Columns of a table (G, n + 1) at rank share * n: (G,)."""
        low = min(int(share * self.size), self.size - 1)
        part = share * self.size - low
        return (1 - part) * table[:, low] + part * table[:, low + 1]

    def solve(self, cosine: float, share: float) -> tuple[float, float]:
        """Alpha and beta whose part of rank share * d has norm sqrt(d) and this cosine with the identity, over 1."""
        norms = np.sqrt(self._at(self.square, share))
        cosines = np.maximum.accumulate(self._at(self.trace, share) / norms)
        # |tr M| <= sqrt(rank) |M|_F, with equality for a projection: the last of the table.
        angle = float(np.interp(abs(cosine), cosines, self.angles))
        scale = 1 / float(np.interp(angle, self.angles, norms))
        return scale * math.cos(angle), math.copysign(scale * math.sin(angle), cosine)

    def spectrum(self, alpha: float, beta: float, rank: int, share: float) -> np.ndarray:
        """Singular values (rank,) of one product of the recipe, over |M|_F."""
        position = float(np.interp(math.atan2(abs(beta), alpha), self.angles, np.arange(_ANGLES)))
        low = min(int(position), _ANGLES - 2)
        small = max(1, round(share * self.size))
        rows = [self._values(i, small) for i in (low, low + 1)]
        row = (low + 1 - position) * rows[0] + (position - low) * rows[1]
        out = np.interp((np.arange(rank) + 0.5) / rank * small - 0.5, np.arange(small), row)
        return out / np.linalg.norm(out)

    @lru_cache(maxsize=1024)  # noqa: B019 - there is one object for each group, which is kept anyway
    def _values(self, i: int, rank: int) -> np.ndarray:
        return torch.linalg.svdvals(self.first[i][:, :rank]).numpy()


@lru_cache(maxsize=8)
def _limits(group: int) -> _Limits:
    return _Limits(group)
