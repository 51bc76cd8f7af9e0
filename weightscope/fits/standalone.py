"""A Python file that applies an artifact and needs torch and safetensors only."""

from collections.abc import Sequence
from keyword import iskeyword
from pathlib import Path

from weightscope._util import atomic, outputs
from weightscope._util.names import listing
from weightscope.errors import UsageError
from weightscope.fits.population_fit import PopulationFit, load_artifact
from weightscope.fits.structure import STRUCTURES, Structure

_FORMS = ("affine", "kronecker", "group_means")  # what the template samples; others bring a function of their own

# The texts that come from an artifact are put in as literals, so that no name can become code.
_HEAD = '''\
"""Initialise tensors of a network from an artifact that is in the folder of this file.

    init_(network, generator=torch.Generator().manual_seed(0))

It draws at the fitted shapes only; `load_init` of weightscope resizes where the structure allows it.
"""

import json
{imports}from math import prod
from pathlib import Path

import torch
from safetensors import safe_open

ARTIFACT = {artifact!a}
ABOUT = {about!a}
_FORMS = {{}}


'''

_BODY = '''\
@torch.no_grad()
def init_(module, generator=None):
    """Set the artifact's tensors in place and leave all others unchanged."""
    with safe_open(Path(__file__).with_name(ARTIFACT), "pt") as file:
        groups = json.loads(file.metadata()["weightscope"])["groups"]
        arrays = {key: file.get_tensor(key) for key in file.keys()}
    own = {k.replace("_orig_mod.", "").removeprefix("module."): v for k, v in module.state_dict().items()}
    for name, shape, _ in (entry for group in groups for entry in group["spec"]):
        if name not in own or list(own[name].shape) != shape:
            found = tuple(own[name].shape) if name in own else "no such tensor"
            raise ValueError(f"{name}: this file draws at the fitted shape {tuple(shape)} only, found {found}")
    for i, group in enumerate(groups):
        a = {key.removeprefix(f"{i}."): value for key, value in arrays.items() if key.startswith(f"{i}.")}
        sample = _FORMS.get(group["form"], _sample)
        x = sample(group, a, lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64))
        if "varying" in a:  # entries that are the same in every network
            x = a["values"].masked_scatter(a["varying"].bool(), x)
        for name, shape, _ in group["spec"]:
            own[name].copy_(x[: prod(shape)].reshape(shape))
            x = x[prod(shape) :]
    return module


def _sample(group, a, randn):
    """One sample of a group's entries that vary: its mean plus a linear map of standard normal noise."""
    x = a.get("mean", torch.zeros(0, dtype=torch.float64)).clone()
    if "variance" in a:
        x += a["variance"].sqrt() * randn(len(x))
    if "factor" in a:
        x += a["factor"] @ randn(a["factor"].shape[1])
    matrices = group["matrices"] if group["form"] != "affine" else []
    start = 0
    for j, (p, n) in enumerate(matrices):
        z = randn(p, n)
        if group["form"] == "kronecker":
            z = a[f"rows.{j}"] @ z @ a[f"columns.{j}"].T
        else:  # residual, row, column and grand means, each scaled by its own standard deviation
            row, column, grand = z.mean(1, keepdim=True), z.mean(0, keepdim=True), z.mean()
            parts = z - row - column + grand, row - grand, column - grand, grand
            z = sum(root * part for root, part in zip(a["eigenvalues"][j].sqrt(), parts))
        x[start : start + p * n] += z.flatten()
        start += p * n
    return x
'''


def write_standalone(
    artifact: PopulationFit | str | Path,
    file: str | Path,
    *,
    structures: Sequence[str | type[Structure]] = (),
    overwrite: bool = False,
) -> Path:
    """Write a Python file with one function, `init_(module, generator=None)`, that applies an artifact.

    The file needs torch and safetensors, not weightscope, and reads the artifact from its own folder: an artifact in
    another folder is copied, a fit is saved as `file` with the suffix `.safetensors`. For the same generator the
    weights equal those of `load_init` up to float64 rounding. It draws at the fitted shapes only, unlike `load_init`,
    which resizes. `structures` as in `load_artifact`; `overwrite` replaces files that weightscope did not write.

    Raises:
        UsageError: if the name is not one that Python can import (`name.py`), the artifact was fitted to one network,
            or it has a structure of another package that is sampled in its own way.
        DataError: if the artifact is invalid.

    Example:
        >>> write_standalone("digits-mlp.safetensors", "digits_mlp.py")
    """
    file = Path(file)
    if file.suffix != ".py" or not file.stem.isidentifier() or iskeyword(file.stem):
        raise UsageError(
            f"a standalone initialiser needs a file name that Python can import (name.py), found {file.name!r}"
        )
    result = artifact if isinstance(artifact, PopulationFit) else load_artifact(artifact, structures=structures)
    if not isinstance(result, PopulationFit):
        raise UsageError(f"{artifact}: fitted to one network; standalone initialisers are for fits to a population")
    stored = None if isinstance(artifact, PopulationFit) else Path(artifact)
    beside = file.with_suffix(".safetensors") if stored is None else file.with_name(stored.name)
    source = standalone_source(result, beside.name)  # what cannot be written is an error before anything is
    outputs.checked(file, overwrite=overwrite)
    if stored is None:
        result.save(outputs.checked(beside, overwrite=overwrite))
    elif beside.resolve() != stored.resolve():
        atomic.write(outputs.checked(beside, overwrite=overwrite), stored.read_bytes())
    atomic.write(file, source.encode())
    return file


def standalone_source(result: PopulationFit, artifact: str) -> str:
    """The text of the file for an artifact of this name; a UsageError if a structure cannot be sampled by it."""
    own = {}
    for group in result.groups:
        kind = group.structure
        if kind is not None and kind.standalone is not None:
            own[kind.form] = kind.standalone
        elif kind is not None and kind.form not in _FORMS:
            known = [*_FORMS, *(cls.form for cls in STRUCTURES.values() if cls.standalone is not None)]
            raise UsageError(f"{group.label}: a standalone initialiser needs one of the forms {', '.join(known)}")
    kinds = ", ".join(sorted({group.label for group in result.groups}))
    about = f"{listing(result.spec.names)}, fitted to {result.networks} networks; structures: {kinds}"
    needed = {form: own[form] for form in sorted(own)}
    imports = "".join(sorted((code.imports for code in needed.values()), reverse=True))
    text = _HEAD.format(artifact=artifact, about=about, imports=imports) + _BODY
    functions = "".join(f"{code.text}\n\n_FORMS[{form!a}] = {code.function}\n" for form, code in needed.items())
    return text + functions
