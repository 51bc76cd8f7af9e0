"""17 terms of 128 networks, 76% of what `exchangeable` gains in held-out log-likelihood.

Written by `weightscope fit-init vit32.pop --explain`.
"""

from weightscope.init import from_terms_

SCALES = {  # mean and std at the first, middle and last block; of layers with a fan-in times sqrt(3 fan_in)
    "blocks.*.norm1.weight": ([1.01, 1.02, 1.04], [0.042, 0.0344, 0.0359]),
    "blocks.*.norm1.bias": ([-0.00055, 4.95e-05, -0.000369], [0.0193, 0.0144, 0.0194]),
    "blocks.*.attn.qkv.weight[q]": ([0.0, 0.0, 0.0], [1.18, 1.21, 1.25]),
    "blocks.*.attn.qkv.weight[k]": ([0.0, 0.0, 0.0], [1.15, 1.18, 1.24]),
    "blocks.*.attn.qkv.weight[v]": ([0.0, 0.0, 0.0], [1.06, 1.06, 1.07]),
    "blocks.*.attn.qkv.bias[q]": ([0.0, 0.0, 0.0], [1.15, 1.21, 1.31]),
    "blocks.*.attn.qkv.bias[k]": ([0.0, 0.0, 0.0], [0.988, 0.989, 0.992]),
    "blocks.*.attn.qkv.bias[v]": ([0.0, 0.0, 0.0], [0.974, 0.974, 0.965]),
    "blocks.*.attn.proj.weight": ([0.0, 0.0, 0.0], [1.04, 1.05, 1.06]),
    "blocks.*.attn.proj.bias": ([-0.0163, 0.0019, -0.0124], [0.98, 0.977, 0.962]),
    "blocks.*.norm2.weight": ([1.02, 1.02, 1.05], [0.05, 0.0391, 0.0431]),
    "blocks.*.norm2.bias": ([0.000196, -0.000159, -0.0003], [0.0263, 0.0202, 0.0171]),
    "blocks.*.mlp.fc1.weight": ([-0.00211, 0.000875, 0.00036], [1.11, 1.1, 1.13]),
    "blocks.*.mlp.fc1.bias": ([-0.13, -0.158, -0.131], [0.976, 0.967, 0.962]),
    "blocks.*.mlp.fc2.weight": ([0.00105, 0.00384, -0.00192], [1.23, 1.21, 1.26]),
    "blocks.*.mlp.fc2.bias": ([0.00888, 0.00199, 0.0312], [1.01, 1.0, 0.972]),
}
TERMS = [  # correlations, or stds of a part over that of independent entries, at the first and the last block
    ("blocks.*.mlp.fc1.weight", "blocks.*.mlp.fc1.weight", "channels", "std", [1.59, 1.26]),
    ("blocks.*.mlp.fc2.weight", "blocks.*.mlp.fc2.weight", "hidden", "std", [0.818]),
    ("blocks.*.norm1.weight", "blocks.*.norm2.weight", "channels", "same block", [0.545, 0.109]),
    ("blocks.*.mlp.fc1.weight", "blocks.*.mlp.fc2.weight", "channels", "same block", [0.282, 0.391]),
    ("blocks.*.norm2.bias", "blocks.*.mlp.fc1.weight", "channels", "same block", [0.24, -0.397]),
    ("blocks.*.norm1.bias", "blocks.*.norm2.bias", "channels", "same block", [0.331, -0.343]),
    ("blocks.*.mlp.fc2.weight", "blocks.*.mlp.fc2.weight", "channels", "std", [1.26, 1.09]),
    ("blocks.*.mlp.fc1.weight", "blocks.*.mlp.fc1.weight", "hidden", "std", [0.911]),
    ("blocks.*.attn.qkv.weight[q]", "blocks.*.attn.qkv.weight[q]", "qk", "std", [0.848]),
    ("blocks.*.attn.qkv.weight[k]", "blocks.*.attn.qkv.weight[k]", "qk", "std", [0.894, 0.826]),
    ("blocks.*.mlp.fc1.weight", "blocks.*.mlp.fc2.weight", "channels x hidden", "same block", [-0.0183]),
    ("blocks.*.mlp.fc1.weight", "blocks.*.mlp.fc2.bias", "channels", "same block", [0.151]),
    ("blocks.*.norm2.bias", "blocks.*.mlp.fc2.weight", "channels", "same block", [0.28, 0.13]),
    ("blocks.*.norm2.bias", "blocks.*.norm1.bias", "channels", "1 apart", [0.0577, -0.351]),
    ("blocks.*.norm2.bias", "blocks.*.mlp.fc1.weight", "means", "same block", [-0.692]),
    ("blocks.*.attn.qkv.weight[v]", "blocks.*.attn.proj.weight", "channels x vo", "same block", [-0.0242]),
    ("blocks.*.attn.qkv.weight[q]", "blocks.*.attn.qkv.weight[k]", "channels x qk", "same block", [0.0306, -0.0185]),
]


def start(module, *, generator, gain=1.0):
    return from_terms_(module, scales=SCALES, terms=TERMS, gain=gain, generator=generator)


def _of(line):
    return line[0].endswith("[v]") and line[1].endswith("attn.proj.weight")


def values_and_outputs(module, *, generator, gain=1.0):
    """With that term as the only correlation."""
    terms = [line for line in TERMS if line[3] == "std" or _of(line)]
    return from_terms_(module, scales=SCALES, terms=terms, gain=gain, generator=generator)


def without_values_and_outputs(module, *, generator, gain=1.0):
    """Without that term."""
    terms = [line for line in TERMS if not _of(line)]
    return from_terms_(module, scales=SCALES, terms=terms, gain=gain, generator=generator)
