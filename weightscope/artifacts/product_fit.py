"""Numbers of mimetic attention: each product of a layer as noise and a multiple of the identity."""

from typing import Any, Literal

from pydantic import Field

from weightscope._util.results import text_table
from weightscope.artifacts.numbers import Numbers, StrictModel


class ProductNumbers(StrictModel):
    """Numbers of `mimetic_attention_` for the product of one layer, mean over its heads.

    Attributes:
        alpha: of the noise.
        beta: of the diagonal, with the product's own sign, as `weightscope products` shows it; `beta_vo` of
            `mimetic_attention_` is minus that of V/O.
        beta_std: standard deviation of the heads' beta.
        diagonal: the product's own diagonal mean, `tr M / d`, smaller than beta because of its rank.
        noise: the product's own least-squares alpha, `|M - diagonal I|_F / sqrt(d)`.
        r2: `d diagonal^2 / |M|_F^2`, the identity's share of the product; at most rank / d.
        attainable: rank / d.
        residual: `|s - s'| / |s|` between the singular values of M and those of the initialiser's products.
    """

    alpha: float = Field(ge=0)
    beta: float
    beta_std: float = Field(ge=0)
    diagonal: float
    noise: float = Field(ge=0)
    r2: float = Field(ge=0, le=1)
    attainable: float = Field(gt=0, le=1)
    residual: float = Field(ge=0)


class ProductLayer(StrictModel):
    """One self-attention module; `depth` is relative, in [0, 1]."""

    name: str
    depth: float = Field(ge=0, le=1)
    width: int = Field(ge=1)
    heads: int = Field(ge=1)
    qk: ProductNumbers
    vo: ProductNumbers


class ProductFit(Numbers):
    """`W_Q W_K^T ~ alpha Z + beta I` and `W_V W_O ~ alpha Z + beta I`, layer by layer.

    Attributes:
        signs: beta has the sign of the product. Artifacts without this entry have minus that of V/O, and are
            converted when they are read.
        parts: the products that the initialiser sets.
        layer_scale: whether the network has one after its attention, and whether it was folded into W_V W_O.
    """

    structure: Literal["identity_product"] = "identity_product"
    signs: Literal["products"] = "products"
    parts: Literal["both", "qk", "vo"] = "both"
    layer_scale: Literal["none", "folded", "left out"] = "none"
    layers: tuple[ProductLayer, ...] = Field(min_length=1)

    def rows(self) -> list[dict[str, Any]]:
        """One row for each layer and product: `name`, `depth`, `width`, `heads`, `part` and the product's numbers."""
        return [
            {**layer.model_dump(exclude={"qk", "vo"}), "part": part, **getattr(layer, part).model_dump()}
            for layer in self.layers
            for part in ("qk", "vo")
        ]

    def text(self) -> str:
        """The numbers layer by layer."""
        each = ("alpha", "beta", "(std)", "R2", "of", "spectrum")
        head = ("layer", "depth", *(f"{part} {word}" for part in ("qk", "vo") for word in each))
        rows = [(x.name, f"{x.depth:.3f}", *_cells(x.qk), *_cells(x.vo)) for x in self.layers]
        note = (
            "R2 is the identity's share of the product, 'of' the most that its rank allows, 'spectrum' the relative "
            "residual of its singular values"
        )
        if self.layer_scale == "folded":
            note += "\nLayerScale is folded into W_V W_O"
        elif self.layer_scale == "left out":
            note += (
                "\nwarning: LayerScale multiplies each channel of W_V W_O and may change its sign; "
                "the option fold_scales=true includes it"
            )
        note = (
            f"beta has the sign of the product, as in `products`; beta_vo of mimetic_attention_ is minus that\n{note}"
        )
        return f"mimetic_attention_ with these numbers, parts {self.parts}\n{note}\n\n" + text_table(head, rows)


def with_signs(numbers: dict[str, Any]) -> dict[str, Any]:
    """The numbers with the products' own signs; `ProductFit` once stored minus the beta of V/O."""
    layers = numbers.get("layers")
    if numbers["structure"] != "identity_product" or "signs" in numbers or not isinstance(layers, list):
        return numbers
    converted = []
    for layer in layers:
        vo = layer.get("vo") if isinstance(layer, dict) else None
        if isinstance(vo, dict) and isinstance(vo.get("beta"), float):
            layer = layer | {"vo": vo | {"beta": -vo["beta"]}}
        converted.append(layer)
    return numbers | {"signs": "products", "layers": converted}


def _cells(fit: ProductNumbers) -> tuple[str, ...]:
    numbers = (f"{fit.alpha:.3f}", f"{fit.beta:+.3f}", f"({fit.beta_std:.3f})")
    return (*numbers, f"{fit.r2:.4f}", f"{fit.attainable:.4f}", f"{fit.residual:.2f}")
