"""Files of other libraries: distributed checkpoints of torch, GGUF, Flax's msgpack, Google's Vision Transformers."""

import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from weightscope.checkpoint.tensors import Store, StoredTensor, in_memory, weights_in
from weightscope.checkpoint.torch_files import unpickled
from weightscope.errors import DataError, UsageError

METADATA = ".metadata"  # of a folder of torch.distributed.checkpoint


def open_distributed(folder: Path, where: str, key: str | None) -> Store:
    """The tensors of a folder of `torch.distributed.checkpoint.save`, each put together when it is read."""
    from torch.distributed.checkpoint import FileSystemReader, load
    from torch.distributed.checkpoint.api import CheckpointException

    class Reader(FileSystemReader):
        def read_metadata(self, *args: Any, **options: Any) -> Any:
            return metadata

    def read(name: str, tensor: Tensor) -> Tensor:
        out = torch.zeros_like(tensor, device="cpu")
        if out.is_floating_point():
            out.fill_(torch.nan)  # what no part holds
        try:
            with warnings.catch_warnings(action="ignore"):  # that there is one process
                load({name: out}, storage_reader=Reader(folder), no_dist=True)
        except CheckpointException as error:  # with what its readers happened to raise
            raise DataError(f"{where}: `{name}`: a file of it is missing, truncated or damaged") from error
        return out

    try:
        metadata = unpickled(folder / METADATA)
        state: dict[str, Any] = {}  # as it was saved, of tensors without memory
        names = dict[int, str]()  # id of a tensor -> its name in the folder
        for name, about in metadata.state_dict_metadata.items():
            *path, last = map(str, (metadata.planner_data or {}).get(name, (name,)))
            value: Any = None
            if hasattr(about, "size"):
                value = torch.empty(about.size, dtype=about.properties.dtype, device="meta")
                names[id(value)] = name
            inner = state
            for parent in path:
                inner = inner.setdefault(parent, {})
            inner[last] = value
    except Exception as error:  # what unpickling happens to raise
        raise DataError(f"{where}: {METADATA} is damaged or of another version of torch: {error}") from error
    weights, beside, note = weights_in(state, key, where)
    found = {
        name: StoredTensor(name, tuple(t.shape), t.dtype, partial(read, names[id(t)], t), names[id(t)])
        for name, t in weights.items()
        if t is not None
    }
    return Store(where, found, beside | dict.fromkeys(weights.keys() - found.keys(), "no tensor"), note=note)


# Names of llama.cpp and of transformers, for models of which llama.cpp changes no values.
_LLAMA = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_BLOCK = {"attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj"}
_BLOCK |= {"attn_output": "self_attn.o_proj", "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_BLOCK |= {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
_BLOCK |= {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
_FACTS = {"attention.head_count": "num_attention_heads", "attention.head_count_kv": "num_key_value_heads"}
_FACTS |= {"attention.key_length": "head_dim", "embedding_length": "hidden_size"}


def open_gguf(path: Path, where: str) -> Store:
    """The tensors of a GGUF file that are not quantised.

    Those of Llama, Qwen 2 and Qwen 3 have the names and the order of rows of transformers; others those of llama.cpp.
    """
    gguf = _imported("gguf", where)
    try:
        reader = gguf.GGUFReader(path, "c")
        fields = {key: reader.get_field(key) for key in reader.fields}
    except Exception as error:  # IndexError, ValueError, KeyError of a file cut off
        raise DataError(f"{where}: it is truncated, damaged or not a GGUF file: {error}") from error
    kind = fields["general.architecture"].contents() if "general.architecture" in fields else ""
    there = {ours: fields[f"{kind}.{theirs}"] for theirs, ours in _FACTS.items() if f"{kind}.{theirs}" in fields}
    config = {name: found for name, field in there.items() if isinstance(found := field.contents(), int)}
    heads = config.get("num_attention_heads", 0)
    known = kind in ("llama", "qwen2", "qwen3") and heads > 0
    store = Store(where, {}, config=config | ({"model_type": kind} if known else {}))
    for tensor in reader.tensors:
        name = tensor.name
        if known:
            stem, _, end = name.rpartition(".")
            block = re.fullmatch(r"blk\.(\d+)\.(.+)", stem)
            stem = f"model.layers.{block[1]}.{_BLOCK.get(block[2], block[2])}" if block else _LLAMA.get(stem, stem)
            name = f"{stem}.{end}"
        stored = tensor.tensor_type.name
        if stored not in ("BF16", "F16", "F32", "F64"):
            store.unreadable[name] = f"quantised ({stored}), not read; convert the model with --outtype bf16"
            continue
        bits = tensor.data.view("int16") if stored == "BF16" else tensor.data
        value = torch.from_numpy(bits).view(torch.bfloat16) if stored == "BF16" else torch.from_numpy(bits)
        store.tensors[name] = in_memory(name, value)
        if kind == "llama" and known and (row := re.search(r"\.([qk])_proj\.", name)):
            turn = partial(_halves, heads=heads if row[1] == "q" else config.get("num_key_value_heads", heads))
            store.tensors[name] = store.tensors[name].changed(name, turn)
    return store


def _halves(rows: Tensor, heads: int) -> Tensor:
    """The rows of each head in transformers' order, where llama.cpp has those that rotate together side by side."""
    return rows.unflatten(0, (heads, -1, 2)).transpose(1, 2).reshape(rows.shape)


def open_msgpack(path: Path, where: str, key: str | None) -> Store:
    """The arrays of `flax.serialization.to_bytes`, or `params` of these, as torch has them."""
    msgpack = _imported("msgpack", where)

    def array(code: int, data: bytes) -> Any:
        if code not in (1, 3):  # an array, a NumPy scalar
            return None
        shape, kind, values = msgpack.unpackb(data, raw=True)
        return torch.frombuffer(bytearray(values), dtype=getattr(torch, kind.decode())).reshape(shape)

    def whole(pairs: list[tuple[str, Any]]) -> Any:
        value = dict(pairs)
        chunked = "__msgpack_chunked_array__" in value
        return torch.cat([*value["chunks"].values()]).reshape([*value["shape"].values()]) if chunked else value

    try:
        value = msgpack.unpackb(path.read_bytes(), ext_hook=array, object_pairs_hook=whole, strict_map_key=False)
    except Exception as error:  # of msgpack, and of what the bytes are taken for
        raise DataError(f"{where}: it is truncated, damaged or not a file of Flax: {error}") from error
    if key is None and isinstance(value, Mapping) and "params" not in value:
        value = {"params": value}
    weights, left, _ = weights_in(value, key or "params", where)
    left |= {name: "no tensor" for name, item in weights.items() if not isinstance(item, Tensor)}
    entries = [in_memory(name, value) for name, value in weights.items() if name not in left]
    return replace(torch_like(entries, where), unreadable=left)


# Google's Vision Transformers, of vision_transformer and of big_vision, in timm's names.
_VIT = (
    (r"^(opt\.target|params)\.", ""),
    (r"Transformer\.encoderblock_(\d+)\.", r"blocks.\1."),
    (r"MultiHeadDotProductAttention_\d+\.out\.", "attn.proj."),
    (r"MultiHeadDotProductAttention_\d+\.(query|key|value)\.", lambda match: f"attn.{match[1][0]}_proj."),
    (r"MlpBlock_\d+\.Dense_0\.", "mlp.fc1."),
    (r"MlpBlock_\d+\.Dense_1\.", "mlp.fc2."),
    (r"LayerNorm_0\.", "norm1."),
    (r"LayerNorm_[12]\.", "norm2."),
    (r"Transformer\.encoder_norm\.", "norm."),
    (r"Transformer\.posembed_input\.pos_embedding$", "pos_embed"),
    (r"(^|\.)embedding\.(kernel|bias)$", r"\1patch_embed.proj.\2"),
    (r"(^|\.)cls$", r"\1cls_token"),
)
_LEAVES = {"kernel": "weight", "scale": "weight", "embedding": "weight"}


def torch_like(entries: Sequence[StoredTensor], where: str) -> Store:
    """Arrays of Flax's layers under torch's names and in its orientation: (in, out) becomes (out, in).

    The axes of heads are joined, filters are (out, in, ...), and the layers of Google's Vision Transformers have timm's
    names, with queries, keys and values apart.
    """
    shapes = {entry.name: entry.shape for entry in entries}
    queries = {name: shape for name, shape in shapes.items() if name.endswith(".query.kernel") and len(shape) == 3}
    heads = {name.removesuffix(".query.kernel"): shape[1] for name, shape in queries.items()}
    google = any("Transformer.encoderblock_" in name for name in shapes)
    store = Store(where, {}, config={"num_heads": max(heads.values())} if len({*heads.values()}) == 1 else {})
    for entry in entries:
        name = entry.name
        if google:
            for pattern, new in _VIT:
                name = re.sub(pattern, new, name)
        path, _, leaf = name.rpartition(".")
        name = f"{path}.{_LEAVES.get(leaf, leaf)}" if path else leaf
        parent, _, layer = entry.name.rpartition(".")[0].rpartition(".")
        if leaf == "kernel" and len(entry.shape) > 1:
            joined = parent in heads and len(entry.shape) == 3
            entry = entry.changed(name, partial(_turned, layer=layer if joined else ""))
        elif leaf == "bias" and parent in heads:
            entry = entry.changed(name, Tensor.flatten)
        store.tensors[name] = entry
    return store


def _turned(kernel: Tensor, layer: str) -> Tensor:
    """The kernel of a layer as torch has it; of attention's with its axes of heads and of their channels joined."""
    if layer:
        return kernel.flatten(0, 1).mT if layer == "out" else kernel.flatten(1).mT
    return kernel.permute(-1, -2, *range(kernel.ndim - 2))


def _imported(name: str, where: str) -> Any:
    try:
        return import_module(name)
    except ImportError as error:
        raise UsageError(f"{where}: reading it needs {name}; `pip install {name}`") from error
