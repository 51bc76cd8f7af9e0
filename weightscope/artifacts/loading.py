"""`load_artifact`: a fitted initialiser from its file."""

from collections.abc import Sequence
from pathlib import Path

from weightscope.artifacts.format import read_contents
from weightscope.artifacts.network_fit import FORMAT as NETWORK_FORMAT
from weightscope.artifacts.network_fit import NetworkFit, network_fit_of
from weightscope.artifacts.population_fit import PopulationFit, population_fit_of
from weightscope.errors import DataError
from weightscope.structures import Structure


def load_artifact(path: str | Path, *, structures: Sequence[str | type[Structure]] = ()) -> PopulationFit | NetworkFit:
    """Read an artifact; everything that it states is checked.

    An artifact whose structure is not part of weightscope names it as `"package.module:Class"`, with the hash of its
    source. A file cannot make weightscope import anything: such an artifact is read only if the caller lists the
    structure, and only if its source is unchanged.

    Args:
        path: a file written by `PopulationFit.save` or `NetworkFit.save`.
        structures: trusted structures of other packages, as classes or as `"package.module:Class"`.

    Raises:
        DataError: if the file is missing, not an artifact or of another version, its arrays do not match the header
            or are not finite, or its structure is not one of weightscope and not listed.

    Example:
        >>> load_artifact("mlp.safetensors").groups[0].label
        'dense'
        >>> load_artifact("own.safetensors", structures=[MyStructure])
    """
    header, arrays = read_contents(path)
    try:
        if isinstance(header, dict) and header.get("format") == NETWORK_FORMAT:
            return network_fit_of(header, arrays)
        return population_fit_of(header, arrays, structures)
    except DataError as error:
        raise DataError(f"{path}: {error}") from error
