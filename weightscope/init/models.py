"""Models by name, untrained: of timm, of transformers, or of a function of one's own; and their files."""

from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torch import nn

from weightscope._util import atomic
from weightscope._util.names import joined, unknown
from weightscope._util.outputs import writable_path
from weightscope._util.plugins import imported, is_reference, why_not_imported
from weightscope._util.torch_random import seeded
from weightscope.anatomy.from_code import timm_model
from weightscope.errors import UsageError, WeightscopeError

SUFFIXES = (".safetensors", ".pt", ".pth")


def build(model: str, options: Mapping[str, Any], seed: int) -> nn.Module:
    """The model `timm:NAME`, `hf:FOLDER`, `hf://ORG/NAME` (whose config is read) or `package.module:function`.

    Options are arguments of `timm.create_model` or of the function, or fields of the config; the class is the first of
    the config's `architectures`. The library's own initialisation draws from the seed.
    """
    library, name = _library(model)
    make = {"timm": timm_model, "hf": _transformers}.get(library)
    if library == "hf" and not name.startswith("//") and not Path(name).exists():
        raise UsageError(f"{model}: no such folder; for a model at the hub hf://ORG/NAME")
    with seeded(seed):
        try:
            found = imported(model)(**options) if make is None else make(name.removeprefix("//"), **options)
        except WeightscopeError:
            raise
        except Exception as error:  # of foreign code, on a wrong option or name
            if "torchvision" in f"{error} {error.__cause__}":
                raise UsageError(f"{model}: {why_not_imported(error)}") from error
            if isinstance(error, ImportError):
                package = {"timm": "timm", "hf": "transformers"}.get(library, "what it imports")
                raise UsageError(f"{model}: {error}; `pip install {package}`") from error
            raise UsageError(f"{model}: it raised {type(error).__name__}: {error}") from error
    if not isinstance(found, nn.Module):
        raise UsageError(f"{model}: expected a function that returns a module, found {found!r:.60}")
    return found


def _library(model: str) -> tuple[str, str]:
    """`timm`, `hf` or a module, and the name in it."""
    library, _, name = model.partition(":")
    if library not in ("timm", "hf") and not is_reference(model):
        raise UsageError(f"{model}: expected timm:NAME, hf:FOLDER, hf://ORG/NAME or package.module:function")
    return library, name


def _transformers(name: str, **options: Any) -> nn.Module:
    import transformers

    config, unused = transformers.AutoConfig.from_pretrained(name, return_unused_kwargs=True, **options)
    if unused:
        fields = sorted(config.to_dict().keys() - transformers.PretrainedConfig().to_dict().keys())
        raise UsageError(f"hf:{name}: {unknown('field of the config', next(iter(unused)), fields)}")
    kind = config.architectures or ["none"]
    kind = kind if isinstance(kind, str) else kind[0]
    made: Any = getattr(transformers, kind, None)
    if not callable(made):
        raise UsageError(
            f"hf:{name}: expected a config whose `architectures` name a class of transformers, found {kind}; "
            "add --option architectures=GPT2LMHeadModel, or what it is"
        )
    return made(config)


def check_output(model: str, path: Path, *, overwrite: bool = False) -> None:
    """UsageError if the model's name has another form, or `save` cannot write there: suffix, folder, or it exists."""
    folder = _library(model)[0] == "hf"
    if folder and path.exists():
        only = "--overwrite replaces files only: " * overwrite
        raise UsageError(
            f"{path}: expected the name of a new folder, found one that exists; {only}name another or remove it"
        )
    if path.is_file() and not overwrite:
        raise UsageError(f"{path}: exists; name another, remove it, or add --overwrite")
    if folder and path.suffix in SUFFIXES:
        raise UsageError(f"{path}: expected the name of a folder, which `from_pretrained` loads")
    writable_path(path, *(() if folder else SUFFIXES), overwrite=True)


def save(model: str, module: Any, path: Path) -> None:
    """Write a model of `build`: a folder that `from_pretrained` loads, or its state dict."""
    if model.startswith("hf:"):
        with TemporaryDirectory(dir=path.absolute().parent, prefix=f".{path.name}.") as temporary:
            inside = Path(temporary, "model")
            try:
                module.save_pretrained(inside)
                type(module.config).from_pretrained(inside)
            except Exception as error:  # fields that contradict each other
                raise UsageError(f"{model}: transformers cannot save or load it: {error}") from error
            inside.rename(path)
        return
    state = module.state_dict()
    if path.suffix == ".safetensors":
        from safetensors.torch import save as to_bytes

        try:
            data = to_bytes({name: value.contiguous() for name, value in state.items()}, {"format": "pt"})
        except RuntimeError as error:
            owners: dict[int, list[str]] = {}
            for name, value in state.items():
                owners.setdefault(value.untyped_storage().data_ptr(), []).append(name)
            tied = next((names for names in owners.values() if len(names) > 1), list(state))
            raise UsageError(
                f"{path}: {joined(map('`{}`'.format, tied), 4)} are one tensor, which .safetensors does not keep; name "
                "a .pt file"
            ) from error
        atomic.write(path, data)
        return
    import torch

    with atomic.replacing(path) as file:
        torch.save(state, file)
