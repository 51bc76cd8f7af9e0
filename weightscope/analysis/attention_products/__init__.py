"""Products of attention weights, head by head.

`W_Q W_K^T` of a head determines which tokens attend to which, `W_V W_O` of a head or a layer what they pass on, both
as maps of the d channels of the residual stream, in the row-vector convention. In trained transformers their diagonals
differ from noise (thesis Fig. 3.17 and 3.23), which mimetic initialisation reproduces.
"""

from weightscope.analysis.attention_products.computing import products
from weightscope.analysis.attention_products.result import ProductsResult, SourceInfo
from weightscope.anatomy.factored_products import FactoredProduct

__all__ = ["FactoredProduct", "ProductsResult", "SourceInfo", "products"]
