"""Products of the output and input maps of state-space layers."""

from weightscope.analysis.attention_products.options import Options
from weightscope.analysis.attention_products.result import ProductsResult
from weightscope.anatomy import SSMPart
from weightscope.anatomy.factored_products import FactoredProduct


def output_input_product(part: SSMPart) -> FactoredProduct:
    """`W_C^T W_B` of each group of a state-space layer, (G, d, d) of rank N.

    A map of what C and B read: of the residual stream in Mamba-2, of the p inner channels in Mamba. It is the
    counterpart of W_Q W_K^T: where states do not decay, token i adds `C_i^T B_j` of token j (thesis Eq. 3.38).
    """
    sizes = (part.groups, part.state)
    return FactoredProduct(part.read("C").cpu().unflatten(0, sizes).mT, part.read("B").cpu().unflatten(0, sizes).mT)


def append_state_space(
    out: ProductsResult, part: SSMPart, label: str, options: Options, nonfinite: dict[str, int]
) -> None:
    """Append the products of one state-space layer, one for each group, to a result.

    Args:
        out: the result.
        part: the layer.
        label: of the model.
        options: of `products`.
        nonfinite: number of entries of each tensor that are NaN or infinite; counted here.
    """
    product = output_input_product(part)
    spectra = None
    if options.spectra == "all" or (options.spectra == "heads" and product.small):
        spectra = product.singular_values().numpy()
    if not bool(product.finite.all()):
        for letter in ("B", "C"):
            name, found = part.parameters[letter][0], int((~part.read(letter).isfinite()).sum())
            nonfinite |= {name: nonfinite.get(name, 0) + found} if found else {}
    statistics = {name: values.tolist() for name, values in product.statistics().items()}
    corners = None if options.clip is None else product.corner(options.clip).float().numpy()
    for group in range(part.groups):
        place = {"source": label, "name": part.name, "kind": "self", "layer": part.layer, "head": group, "part": "cb"}
        out.append(
            place | {"width": product.shape[0], "rank": product.rank},
            {name: values[group] for name, values in statistics.items()},
            {"rotary": False, "normalised": False, "layer_scale": False},
            None if spectra is None or not bool(product.finite[group]) else spectra[group],
            None if corners is None else corners[group],
        )
