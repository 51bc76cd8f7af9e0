"""13 terms of 256 networks, 66% of what exchangeable gains in held-out log-likelihood.

Written by `weightscope fit-init convnext16.pop --explain`.
"""

from weightscope.init import from_terms_

SCALES = {  # mean and std at the first, middle and last block; of layers with a fan-in times sqrt(3 fan_in)
    "stages.0.blocks.*.conv_dw.weight": ([-0.000271, -0.000465, 0.000476], [1.77, 1.81, 1.8]),
    "stages.0.blocks.*.conv_dw.bias": ([-0.00656, -0.00347, -0.0354], [0.957, 0.981, 1.01]),
    "stages.0.blocks.*.norm.weight": ([1.04, 1.1, 1.12], [0.083, 0.0711, 0.0747]),
    "stages.0.blocks.*.norm.bias": ([-0.000412, 0.000587, 0.000954], [0.0453, 0.0481, 0.0489]),
    "stages.0.blocks.*.mlp.fc1.weight": ([0.0018, -0.00669, -0.00265], [1.35, 1.4, 1.41]),
    "stages.0.blocks.*.mlp.fc1.bias": ([-0.403, -0.4, -0.378], [0.951, 0.929, 0.924]),
    "stages.0.blocks.*.mlp.fc2.weight": ([0.00766, -0.000741, 0.00107], [1.45, 1.55, 1.6]),
    "stages.0.blocks.*.mlp.fc2.bias": ([0.00383, -0.0237, 0.0202], [0.946, 0.931, 0.923]),
}
TERMS = [  # correlations, or stds of a part over that of independent entries, at the first and the last block
    ("stages.0.blocks.*.norm.bias", "stages.0.blocks.*.mlp.fc1.weight", "channels", "same block", [-0.755, -0.805]),
    ("stages.0.blocks.*.mlp.fc1.weight", "stages.0.blocks.*.mlp.fc1.weight", "channels", "std", [1.5, 1.69]),
    ("stages.0.blocks.*.conv_dw.weight", "stages.0.blocks.*.conv_dw.weight", "channels", "pixels 0 2", [0.0558, 0.11]),
    ("stages.0.blocks.*.mlp.fc2.weight", "stages.0.blocks.*.mlp.fc2.weight", "hidden", "std", [0.879, 0.632]),
    ("stages.0.blocks.*.mlp.fc1.weight", "stages.0.blocks.*.mlp.fc1.weight", "hidden", "std", [0.735]),
    ("stages.0.blocks.*.conv_dw.bias", "stages.0.blocks.*.mlp.fc1.weight", "channels", "same block", [-0.512, -0.696]),
    ("stages.0.blocks.*.conv_dw.bias", "stages.0.blocks.*.norm.bias", "channels", "same block", [0.307, 0.461]),
    (
        "stages.0.blocks.*.conv_dw.weight",
        "stages.0.blocks.*.conv_dw.weight",
        "channels",
        "pixels 0 1",
        [-0.0686, 0.044],
    ),
    (
        "stages.0.blocks.*.conv_dw.weight",
        "stages.0.blocks.*.conv_dw.weight",
        "channels",
        "pixels 2 4",
        [-0.00877, -0.0674],
    ),
    (
        "stages.0.blocks.*.conv_dw.weight",
        "stages.0.blocks.*.conv_dw.weight",
        "channels",
        "pixels 1 4",
        [-0.00391, -0.0706],
    ),
    ("stages.0.blocks.*.norm.bias", "stages.0.blocks.*.mlp.fc1.weight", "means", "same block", [-0.854]),
    (
        "stages.0.blocks.*.conv_dw.weight",
        "stages.0.blocks.*.conv_dw.weight",
        "channels",
        "pixels 0 3",
        [0.0106, 0.0571],
    ),
    (
        "stages.0.blocks.*.conv_dw.weight",
        "stages.0.blocks.*.conv_dw.weight",
        "channels",
        "pixels 0 4",
        [-0.0209, -0.0821],
    ),
]


def start(module, *, generator, gain=1.0, permutations=None):
    return from_terms_(module, scales=SCALES, terms=TERMS, gain=gain, permutations=permutations, generator=generator)
