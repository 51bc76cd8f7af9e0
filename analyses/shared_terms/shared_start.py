"""Terms that ViTs of widths 16 and 32 on the digits and on Fashion-MNIST all have, at the mean of their sizes."""

from weightscope.init import from_terms_

SCALES = {
    "blocks.*.norm1.weight": ([1.0], [0.0402]),
    "blocks.*.norm1.bias": ([0.0], [0.0206]),
    "blocks.*.attn.qkv.weight[q]": ([0.0], [1.0]),
    "blocks.*.attn.qkv.weight[k]": ([0.0], [1.0]),
    "blocks.*.attn.qkv.weight[v]": ([0.0], [1.0]),
    "blocks.*.attn.qkv.bias[q]": ([0.0], [1.0]),
    "blocks.*.attn.qkv.bias[k]": ([0.0], [1.0]),
    "blocks.*.attn.qkv.bias[v]": ([0.0], [1.0]),
    "blocks.*.attn.proj.weight": ([0.0], [1.0]),
    "blocks.*.attn.proj.bias": ([0.0], [1.0]),
    "blocks.*.norm2.weight": ([1.0], [0.0466]),
    "blocks.*.norm2.bias": ([0.0], [0.0228]),
    "blocks.*.mlp.fc1.weight": ([0.0], [1.0]),
    "blocks.*.mlp.fc1.bias": ([0.0], [1.0]),
    "blocks.*.mlp.fc2.weight": ([0.0], [1.0]),
    "blocks.*.mlp.fc2.bias": ([0.0], [1.0]),
}
TERMS = [
    ("blocks.*.mlp.fc2.weight", "blocks.*.mlp.fc2.weight", "hidden", "std", [0.823]),
    ("blocks.*.mlp.fc1.weight", "blocks.*.mlp.fc2.weight", "channels x hidden", "same block", [-0.0299]),
    ("blocks.*.mlp.fc1.weight", "blocks.*.mlp.fc1.weight", "hidden", "std", [0.911]),
    ("blocks.*.attn.qkv.weight[q]", "blocks.*.attn.qkv.weight[q]", "qk", "std", [0.847]),
    ("blocks.*.norm2.bias", "blocks.*.mlp.fc2.weight", "channels", "same block", [0.166]),
    ("blocks.*.mlp.fc1.weight", "blocks.*.mlp.fc2.weight", "channels", "same block", [0.221]),
    ("blocks.*.attn.qkv.weight[k]", "blocks.*.attn.qkv.weight[k]", "qk", "std", [0.863]),
    ("blocks.*.norm2.bias", "blocks.*.mlp.fc1.weight", "channels", "same block", [-0.122]),
    ("blocks.*.attn.qkv.weight[v]", "blocks.*.attn.proj.weight", "channels x vo", "same block", [-0.029]),
    ("blocks.*.mlp.fc1.weight", "blocks.*.mlp.fc1.weight", "channels", "std", [1.23]),
    ("blocks.*.norm2.bias", "blocks.*.mlp.fc1.weight", "means", "same block", [-0.539]),
    ("blocks.*.norm2.bias", "blocks.*.attn.proj.bias", "channels", "1 apart", [0.11]),
    ("blocks.*.norm2.bias", "blocks.*.mlp.fc2.bias", "channels", "same block", [0.111]),
    ("blocks.*.mlp.fc2.weight", "blocks.*.mlp.fc2.weight", "channels", "std", [1.13]),
    ("blocks.*.norm1.weight", "blocks.*.norm2.weight", "channels", "same block", [0.215]),
    ("blocks.*.mlp.fc1.weight", "blocks.*.mlp.fc2.bias", "channels", "same block", [0.11]),
    ("blocks.*.norm2.bias", "blocks.*.norm2.bias", "means", "std", [0.767]),
    ("blocks.*.mlp.fc1.weight", "blocks.*.mlp.fc2.weight", "channels", "1 apart", [0.161]),
]


def start(module, *, generator, gain=1.0):
    return from_terms_(module, scales=SCALES, terms=TERMS, gain=gain, generator=generator)
