"""Products of the output and input maps of state-space layers."""

from weightscope.analysis.attention_products.factored import FactoredProduct
from weightscope.anatomy import SSMPart


def output_input_product(part: SSMPart) -> FactoredProduct:
    """`W_C^T W_B` of each group of a state-space layer, (G, d, d) of rank N.

    A map of what C and B read: of the residual stream in Mamba-2, of the p inner channels in Mamba. It is the
    counterpart of W_Q W_K^T: where states do not decay, token i adds `C_i^T B_j` of token j (thesis Eq. 3.38).
    """
    sizes = (part.groups, part.state)
    return FactoredProduct(part.read("C").cpu().unflatten(0, sizes).mT, part.read("B").cpu().unflatten(0, sizes).mT)
