"""A Python file that applies an artifact and needs torch and safetensors only."""

from collections.abc import Sequence
from pathlib import Path

from weightscope._util import atomic
from weightscope.errors import UsageError
from weightscope.fits.population_fit import PopulationFit, load_artifact
from weightscope.fits.structure import Structure

_FORMS = (
    "affine",
    "kronecker",
    "group_means",
    "exchangeable",
    "tensor_normal",
    "fixed",
)  # what the templates implement

_TEMPLATE = '''\
"""Initialise {touched} from {artifact}, in the folder of this file.

    {module}.init_(network, generator=torch.Generator().manual_seed(0))

{summary}
"""

import json
{imports}from math import prod
from pathlib import Path

import torch
from safetensors import safe_open


@torch.no_grad()
def init_(module, generator=None):
    """Set the artifact's tensors in place and leave all others unchanged."""
    with safe_open(Path(__file__).with_name({artifact!r}), "pt") as file:
        groups = json.loads(file.metadata()["weightscope"])["groups"]
        arrays = {{key: file.get_tensor(key) for key in file.keys()}}
    own = {{k.replace("_orig_mod.", "").removeprefix("module."): v for k, v in module.state_dict().items()}}
    for i, group in enumerate(groups):
        a = {{key.removeprefix(f"{{i}}."): value for key, value in arrays.items() if key.startswith(f"{{i}}.")}}
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
            z = a[f"rows.{{j}}"] @ z @ a[f"columns.{{j}}"].T
        else:  # residual, row, column and grand means, each scaled by its own standard deviation
            row, column, grand = z.mean(1, keepdim=True), z.mean(0, keepdim=True), z.mean()
            parts = z - row - column + grand, row - grand, column - grand, grand
            z = sum(root * part for root, part in zip(a["eigenvalues"][j].sqrt(), parts))
        x[start : start + p * n] += z.flatten()
        start += p * n
    return x
'''

_EXCHANGEABLE = '''

def _parts(group, a, randn):
    """One sample of a group: noise for each set of renumbered axes, centred, times its factor, spread over tensors."""
    views = json.loads(bytes(a["permutations"].tolist()))["views"]
    sizes, types = {}, {}
    for view in views:
        sizes |= {x.removeprefix("~"): n for x, n in zip(view["axes"], view["shape"]) if x}
    order = list(sizes)
    place = lambda label: order.index(label.removeprefix("~"))
    for view in views:
        free = sorted({x for x in view["axes"] if x and x[0] != "~"})
        signed = {x for x in view["axes"] if x and x[0] == "~"}
        for some in chain.from_iterable(combinations(free, r) for r in range(len(free) + 1)):
            types.setdefault(tuple(sorted((*signed, *some), key=place)), []).append(view)
    out = {name: torch.zeros(*shape, dtype=torch.float64) for name, shape, _ in group["spec"]}
    for i, key in enumerate(sorted(types, key=lambda key: (len(key), [place(x) for x in key]))):
        factor, start = a[f"factor.{i}"], 0
        z = randn(*(sizes[x.removeprefix("~")] for x in key), len(factor))
        for axis, label in enumerate(key):
            z = z if label[0] == "~" else z - z.mean(axis, keepdim=True)
        z = z @ factor.T
        for view in types[key]:
            axes, shape = view["axes"], view["shape"]
            fixed = [n for n, x in zip(shape, axes) if not x]
            part = z[..., start : start + prod(fixed)].reshape([*z.shape[:-1], *fixed])
            at = iter(range(len(key), part.ndim))
            part = part.permute([key.index(x) if x else next(at) for x in axes if not x or x in key])
            away = [j for j, x in enumerate(axes) if x and x not in key]
            for j in away:
                part = part.unsqueeze(j)
            rows = out[view["tensor"]]
            rows = rows[view["start"] : view["start"] + shape[0]] if shape else rows
            rows += part / prod(shape[j] for j in away) ** 0.5
            start += prod(fixed)
    return a["mean"] + torch.cat([value.flatten() for value in out.values()])
'''

_TENSOR_NORMAL = '''

def _layers(group, a, randn):
    """One sample of a group: the same tensor of several layers as an array (L, p, n), noise times three factors."""
    x, stacks, start = a["mean"].clone(), {}, 0
    for name, shape, _ in group["spec"]:
        stacks.setdefault((re.sub(r"\\d+", "*", name), tuple(shape)), []).append(start)
        start += prod(shape)
    for j, places in enumerate(stacks.values()):
        layers, rows, columns = (a[f"{key}.{j}"] for key in ("layers", "rows", "columns"))
        z = rows @ randn(len(layers), len(rows), len(columns)) @ columns.T
        for start, part in zip(places, torch.tensordot(layers, z, 1).flatten(1)):
            x[start : start + len(part)] += part
    return x
'''

# Form -> (what it imports, its function, the text of this function).
_BY_FORM = {
    "exchangeable": ("from itertools import chain, combinations\n", "_parts", _EXCHANGEABLE),
    "tensor_normal": ("import re\n", "_layers", _TENSOR_NORMAL),
}


def write_standalone(
    artifact: PopulationFit | str | Path, file: str | Path, *, structures: Sequence[str | type[Structure]] = ()
) -> Path:
    """Write a Python file with one function, `init_(module, generator=None)`, that applies an artifact.

    The file needs torch and safetensors, not weightscope, and reads the artifact from its own folder: an artifact in
    another folder is copied, a fit is saved as `file` with the suffix `.safetensors`. For the same generator the
    weights equal those of `load_init` up to float64 rounding.

    Args:
        artifact: a `PopulationFit`, or the path of one.
        file: to write, ending in `.py`.
        structures: trusted structures of other packages, as in `load_artifact`.

    Returns:
        the path of the Python file.

    Raises:
        UsageError: if the name is not one that Python can import, the artifact was fitted to one network, or it has
            a structure of another package that is sampled in its own way.
        DataError: if the artifact is invalid.
        WeightscopeError: if a file cannot be written.

    Example:
        >>> write_standalone("digits-mlp.safetensors", "digits_mlp.py")
    """
    file = Path(file)
    if file.suffix != ".py" or not file.stem.isidentifier():
        raise UsageError(
            f"a standalone initialiser needs a file name that Python can import (name.py), found {file.name!r}"
        )
    result = artifact if isinstance(artifact, PopulationFit) else load_artifact(artifact, structures=structures)
    if not isinstance(result, PopulationFit):
        raise UsageError(f"{artifact}: fitted to one network; standalone initialisers are for fits to a population")
    if foreign := [g.label for g in result.groups if g.structure is not None and g.structure.form not in _FORMS]:
        raise UsageError(f"{foreign[0]}: a standalone initialiser needs one of the forms {', '.join(_FORMS[:-1])}")
    if isinstance(artifact, PopulationFit):
        beside = result.save(file.with_suffix(".safetensors"))
    else:
        beside = file.with_name(Path(artifact).name)
        if beside.resolve() != Path(artifact).resolve():
            atomic.write(beside, Path(artifact).read_bytes())
    atomic.write(file, _source(result, file.stem, beside.name).encode())
    return file


def _source(result: PopulationFit, module: str, artifact: str) -> str:
    names = result.spec.names
    touched = ", ".join(names) if len(names) < 3 else f"{names[0]} and {len(names) - 1} more tensors"
    kinds = sorted({group.label for group in result.groups})
    summary = f"Fitted to {result.networks} networks; structures: {', '.join(kinds)}."
    safe = {
        key: text.replace("\\", "/").replace('"""', "'''")
        for key, text in {"touched": touched, "summary": summary}.items()
    }
    forms = {group.structure.form for group in result.groups if group.structure is not None}
    needed = {form: texts for form, texts in _BY_FORM.items() if form in forms}
    imports = "".join(sorted((texts[0] for texts in needed.values()), reverse=True))
    text = _TEMPLATE.format(module=module, artifact=artifact, imports=imports, **safe)
    functions = ", ".join(f'"{form}": {name}' for form, (_, name, _) in needed.items())
    return text + "".join(texts[2] for texts in needed.values()) + f"\n\n_FORMS = {{{functions}}}\n"
