"""Small inputs that become gigabytes where they are believed: each command answers in one line, soon, in little memory.

Each case runs in a process of its own; `CASES=30 pytest tests/test_expanding.py` tries more of them.
"""

import importlib.util
import io
import json
import os
import pickle
import resource
import struct
import sys
import time
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from random import Random

import h5py
import numpy as np

SECONDS, BYTES = 10.0, 300 * 2**20  # of a case, on a busy machine; what the process may grow by
BLOCK = 2**20
KINDS: dict[str, Callable[[Random, Path], list[str]]] = {}


def kind(make: Callable[[Random, Path], list[str]]) -> Callable[[Random, Path], list[str]]:
    """Register what writes a case's files into a folder and gives the command that reads them."""
    KINDS[make.__name__] = make
    return make


def reading(draw: Random, file: Path) -> list[str]:
    """A command that reads a checkpoint."""
    ways = [["inspect"], ["verify"], ["products"], ["covariance", "--part", "filters"], ["attention-maps"]]
    ways += [["audit", "--init", "xavier"], ["fit-init", "--structure", "filters", "-o", "out.safetensors"]]
    command, *options = draw.choice([*ways, ["import", "-o", "out.pop"]])
    return [command, str(file), *options]


def deflated(size: int, start: bytes = b"") -> bytes:
    """A raw stream of `start` and then `size` zeros, a thousand times smaller, made without compressing each."""
    pack = zlib.compressobj(9, zlib.DEFLATED, -15)
    head = pack.compress(start) + pack.flush(zlib.Z_FULL_FLUSH)
    block = pack.compress(bytes(BLOCK)) + pack.flush(zlib.Z_FULL_FLUSH)
    return head + block * (size // BLOCK) + pack.compress(bytes(size % BLOCK)) + pack.flush()


def archive(file: Path, entries: dict[str, tuple[bytes, int, int]]) -> Path:
    """A zip archive of (content as stored, size that it claims, method)."""
    with zipfile.ZipFile(file, "w") as out:
        for name, (content, size, method) in entries.items():
            info = zipfile.ZipInfo(name)
            out.writestr(info, content)
            info.compress_type, info.file_size = method, size
            info.CRC = 0 if method else info.CRC
            end = out.fp.tell()  # type: ignore[union-attr]
            out.fp.seek(info.header_offset)  # type: ignore[union-attr]
            out.fp.write(info.FileHeader(zip64=False))  # type: ignore[union-attr]
            out.fp.seek(end)  # type: ignore[union-attr]
    return file


def npy(shape: tuple[int, ...], dtype: str = "<f4") -> bytes:
    head = io.BytesIO()
    np.lib.format.write_array_header_1_0(head, {"descr": dtype, "fortran_order": False, "shape": shape})
    return head.getvalue()


@kind
def npz_of_zeros(draw: Random, folder: Path) -> list[str]:
    """Compressed a thousand times, and read one array at a time."""
    entries = {}
    for i in range(draw.randint(1, 4)):
        rows = draw.randint(2**20, 2**23) // 1024
        head = npy((rows, 1024))
        entries[f"w{i}.npy"] = deflated(4096 * rows, head), len(head) + 4096 * rows, zipfile.ZIP_DEFLATED
    return reading(draw, archive(folder / "a.npz", entries))


@kind
def npz_that_lies(draw: Random, folder: Path) -> list[str]:
    head = npy(
        tuple(2 ** draw.randint(5, 40) for _ in range(draw.randint(1, 4))), draw.choice(["<f4", "|V65536", "<f8"])
    )
    size = draw.choice([64, 2**32 - 1])
    entries = {"w.npy": (head + bytes(64), draw.choice([len(head) + 64, size]), zipfile.ZIP_STORED)}
    return reading(draw, archive(folder / "a.npz", entries))


@kind
def safetensors_header(draw: Random, folder: Path) -> list[str]:
    n = 2 ** draw.randint(16, 22)
    tensor = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    text = draw.choice(
        [
            lambda: "[" * n,
            lambda: '{"a":' * n,
            lambda: json.dumps({"w": tensor | {"shape": [2 ** draw.randint(20, 62)]}}),
            lambda: json.dumps({"w": tensor | {"shape": [0, *[2**20] * 60]}}),
            lambda: json.dumps({"w": tensor | {"shape": [1] * (n // 4), "data_offsets": [0, 4]}}),
            lambda: json.dumps({f"w{i}": tensor for i in range(n // 64)}),
            lambda: json.dumps({"w" * n: tensor}),
            lambda: json.dumps({"__metadata__": {"a": "x" * n}, "w": tensor}),
            lambda: json.dumps({"__metadata__": {f"a{i}": "" for i in range(n // 16)}, "w": tensor}),
            lambda: '{"w": ' + "9" * n + "}",
            lambda: '{"w": ' + "[9" + "e9" * draw.randint(1, 2) + "]}",
        ]
    )().encode()
    claimed = draw.choice([len(text), len(text), len(text), 2 ** draw.randint(30, 63)])
    (folder / "a.safetensors").write_bytes(struct.pack("<Q", claimed) + text)
    return reading(draw, folder / "a.safetensors")


def pickled(code: bytes) -> bytes:
    return b"\x80\x02" + code + b"."


def laughs(depth: int) -> bytes:
    """A tuple of two equal tuples of two equal tuples ...: 2^depth leaves in a hundred bytes."""
    return b")" + b"".join(b"q%ch%c\x86" % (i, i) for i in range(depth))


def view(shape: bytes, stride: bytes, offset: bytes = b"K\x00", count: bytes = b"K\x01") -> bytes:
    """A call that builds a tensor of a storage of one number."""
    storage = b"(U\x07storagectorch\nFloatStorage\nU\x010U\x03cpu" + count + b"tQ"
    return b"ctorch._utils\n_rebuild_tensor_v2\n(" + storage + offset + shape + stride + b"\x89}tR"


@kind
def torch_pickle(draw: Random, folder: Path) -> list[str]:
    """Nested tuples with 2^n leaves as a shape, a key, a value or a storage; views that overlap; sizes that lie."""
    deep, count = laughs(draw.randint(20, 200)), 2 ** draw.randint(20, 62)
    long = pickle.dumps(count, 2)[2:-1]
    big = pickle.dumps((count, 2), 2)[2:-1]
    code = draw.choice(
        [
            b"}U\x01w" + view(deep, deep) + b"s",
            b"}U\x01w" + view(b"K\x04\x85", deep) + b"s",
            b"}U\x01w" + view(b"K\x04\x85", b"K\x01\x85", deep) + b"s",
            b"}U\x01w" + view(b"K\x04\x85", b"K\x01\x85", count=deep) + b"s",
            b"}U\x01w" + deep + b"s",
            b"}" + deep + b"K\x01s",
            deep,
            b"}U\x01w" + view(big, b"K\x00K\x00\x86") + b"s",
            b"}U\x01w" + view(long + b"\x85", b"K\x01\x85", count=long) + b"s",
            b"}("
            + b"".join(b"X\x08\x00\x00\x00%08d" % i + view(b"K\x00\x85", b"K\x01\x85") for i in range(20000))
            + b"u",
            b"]" * 2 ** draw.randint(10, 20),
            b"r\xff\xff\xff\x7f".join([b"}", b""]),
            b"\x8e" + struct.pack("<Q", 2 ** draw.randint(30, 62)),
            b"\x8b" + struct.pack("<I", 2**31 - 1),
        ]
    )
    stored = {"a/data.pkl": pickled(code), "a/data/0": bytes(4), "a/version": b"3"}
    entries = {name: (content, len(content), zipfile.ZIP_STORED) for name, content in stored.items()}
    if draw.random() < 0.2:
        size = draw.randint(2**28, 2**31)
        entries[draw.choice(["a/data.pkl", "a/data/0"])] = deflated(size), size, zipfile.ZIP_DEFLATED
    return reading(draw, archive(folder / "a.pt", entries))


@kind
def torch_views(draw: Random, folder: Path) -> list[str]:
    """Thousands of tensors that are views of one storage of a megabyte."""
    import torch

    base = torch.randn(2**18)
    shift = draw.choice([0, 1])
    count = draw.randint(500, 3000)
    torch.save({f"w{i}": base[shift * i : len(base) - count + i].view(1, -1) for i in range(count)}, folder / "a.pt")
    return ["import", str(folder / "a.pt"), "-o", "out.pop"]


@kind
def onnx_sizes(draw: Random, folder: Path) -> list[str]:
    onnx = __import__("onnx")
    tensor = onnx.TensorProto(name="w.weight", data_type=draw.choice([1, 10, 7]))
    tensor.dims.extend([2 ** draw.randint(10, 40), 2 ** draw.randint(0, 20)])
    match draw.randrange(4):
        case 0:
            tensor.raw_data = bytes(64)
        case 1:
            tensor.float_data.extend([0.0] * 64)
        case 2:
            tensor.data_location = onnx.TensorProto.EXTERNAL
            (folder / "big").write_bytes(b"")
            os.truncate(folder / "big", 2**40)  # a file with a hole
            size = 4 * tensor.dims[0] * tensor.dims[1]
            for key, value in (("location", "big"), ("length", str(size))):
                tensor.external_data.add(key=key, value=value)
        case _:
            tensor.dims[:] = [2**20, 0]
    graph = onnx.helper.make_graph([], "g", [], [], [tensor])
    (folder / "a.onnx").write_bytes(onnx.helper.make_model(graph).SerializeToString())
    return reading(draw, folder / "a.onnx")


@kind
def holes(draw: Random, folder: Path) -> list[str]:
    """Files of terabytes that take no room on disk."""
    ends = [".pt", ".npz", ".onnx", ".safetensors", ".h5", ".toml", ".csv", ".parquet", ".json", ".png"]
    file = folder / f"a{draw.choice(ends)}"
    file.write_bytes(draw.choice([b"", b"PK\x03\x04", b"\x89PNG\r\n\x1a\n", b"\x80\x02", b"\x89HDF\r\n\x1a\n"]))
    os.truncate(file, 2 ** draw.randint(32, 42))
    commands = {".h5": ["inspect", str(file)], ".toml": ["collect", str(file), "-o", "out.pop"]}
    table = ["import", str(file), "-o", "out.pop"]
    commands |= {".csv": table, ".parquet": table, ".png": images(folder, file), ".json": ["inspect", str(file)]}
    return commands.get(file.suffix) or reading(draw, file)


@kind
def table(draw: Random, folder: Path) -> list[str]:
    """Parquet that is compressed, or that repeats one value; a CSV of separators."""
    file, rows = folder / "a.parquet", draw.randint(2**22, 2**25)
    match draw.randrange(4):
        case 0:
            pyarrow = __import__("pyarrow", fromlist=["parquet"])
            parquet = __import__("pyarrow.parquet", fromlist=["write_table"])
            cells = pyarrow.DictionaryArray.from_arrays(pyarrow.array(np.zeros(rows, np.int8)), ["net.pt" * 20])
            parquet.write_table(pyarrow.table({"path": cells}), file, compression="zstd")
        case 1:
            pyarrow = __import__("pyarrow")
            parquet = __import__("pyarrow.parquet", fromlist=["write_table"])
            long = pyarrow.array(["x" * 2**20] * 200)
            writer = parquet.ParquetWriter(file, pyarrow.schema([("path", pyarrow.string())]), compression="zstd")
            for _ in range(draw.randint(4, 8)):
                writer.write_table(pyarrow.table({"path": long}))
            writer.close()
        case 2:
            file = folder / "a.csv"
            file.write_text("path" + "," * (rows // 8) + "\n")
        case _:
            file = folder / "a.csv"
            file.write_text("path,loss\n" + "a,1\n" * (rows // 4 + 1))
    return ["import", str(file), "-o", "out.pop"]


@kind
def hdf5(draw: Random, folder: Path) -> list[str]:
    """An export with a fitting digest, whose arrays are compressed zeros, or were never written."""
    from weightscope.population import exporting

    n = draw.randint(2**28, 2**40)
    file, way = folder / "a.h5", draw.choice(["never written", "compressed"])
    spec = json.dumps([{"name": "w", "shape": [1], "kind": "parameter"}])
    with h5py.File(file, "w", userblock_size=512) as h5:
        if way == "compressed":
            n = 2**28
            metric = h5.create_dataset("metrics/a", (n,), "f8", chunks=(2**22,), compression="gzip", fillvalue=1)
            metric[: 2**23] = 0
        else:
            h5.create_dataset("metrics/a", (n,), "f8", chunks=(2**16,))
        for name, dtype, shape in (("network", "i8", (n,)), ("seed", "u8", (n,)), ("weights", "f4", (n, 1))):
            h5.create_dataset(name, shape, dtype, chunks=(2**16, *shape[1:]))
        for name in ("spec", "recipe", "environment"):
            h5[name] = np.bytes_((spec if name == "spec" else "{}").encode())
    with file.open("r+b") as stream:
        digest = exporting._content(stream)
        stream.seek(0)
        stream.write(f"weightscope-export 1, sha256 of what follows byte 512: {digest}\n".encode())
    return ["inspect", str(file)]


RECIPE = '{network}[data]\nname = "digits"\n[population]\nnetworks = {n}\ntile = {tile}\n'


@kind
def recipe(draw: Random, folder: Path) -> list[str]:
    n = 2 ** draw.randint(10, 20)
    text = draw.choice(
        [
            "a = " + "[" * n,
            "[" + ".".join(["a"] * n) + "]\n",
            "[[a]]\n" * n,
            "\n".join(f"a{i} = 1" for i in range(n)),
            'a = "' + "x" * n + '"',
            "a = " + "9" * n,
            "a = " + "{a=" * min(n, 2**14),
            RECIPE.format(network='[network]\ntype = "convnext"\nwidth = 4\ndepth = 1\n', n=10**18, tile=10**18),
            RECIPE.format(network=f'[network]\ntype = "convnext"\nwidth = {2**30}\ndepth = {2**30}\n', n=1, tile=1),
            RECIPE.format(network=f'[network]\ntype = "vit"\nwidth = 64\nheads = 1\ndepth = {10**7}\n', n=1, tile=1),
        ]
    )
    (folder / "a.toml").write_text(text)
    return draw.choice([["collect", "a.toml", "-o", "out.pop"], ["bench", "a.toml", "--init", "default"]])


@kind
def texts(draw: Random, folder: Path) -> list[str]:
    """Arguments of a few bytes that stand for billions of values."""
    n = 10 ** draw.randint(5, 6) - 1
    return draw.choice(
        [
            ["import", f"hf://a/b{{0..{n}}}{{0..{n}}}", "-o", "out.pop"],
            ["import", "hf://a/" + "{0..9}" * draw.randint(8, 30), "-o", "out.pop"],
            ["import", "hf://a/b" + "{a,b}" * draw.randint(24, 60), "-o", "out.pop"],
            [
                "bench",
                "digits-convnext",
                "--init",
                "mimetic_mlp",
                "--grid",
                f"mimetic_mlp.sigma=0:1:1e-{draw.randint(7, 300)}",
            ],
            [
                "bench",
                "digits-convnext",
                "--init",
                "default",
                *[x for i in range(9) for x in ("--vary", f"network.width{i}={','.join(map(str, range(99)))}")],
            ],
            ["bench", "digits-convnext", "--init", "+".join(["mimetic_mlp"] * 100), "--seeds", str(10**18)],
            ["bench", "digits-convnext", "--init", "default", "--epochs", str(10**18), "--seeds", str(10**15)],
            ["collect", "digits-convnext", "-o", "out.pop", "-n", str(10 ** draw.randint(15, 18)), "--plan"],
            ["demo", "--networks", str(10**18), "-o", "out"],
            ["bench", "digits-convnext", "--init", "impulse_filters(kernel_size=" + "(" * draw.choice([500, n]) + ")"],
            ["bench", "digits-convnext", "--init", f"mimetic_mlp(sigma={'9' * 10**5})"],
        ]
    )


def images(folder: Path, file: Path) -> list[str]:
    import torch

    from weightscope.networks import ViT

    (folder / "vit").mkdir(exist_ok=True)
    torch.save(ViT(16, 4, 24, 2, 3, 5).state_dict(), folder / "vit" / "pytorch_model.bin")
    (folder / "vit" / "config.json").write_text('{"num_heads": 3, "image_size": 16}')
    return ["attention-maps", str(folder / "vit"), "--images", str(file), "--count", "4"]


@kind
def picture(draw: Random, folder: Path) -> list[str]:
    def chunk(name: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))

    file, side = folder / "a.png", 2 ** draw.randint(13, 30)
    small = zlib.compress(b"\0" + bytes(3))
    body = [chunk(b"IDAT", small)]
    size = (1, 1)
    match draw.randrange(5):
        case 0:
            size = (side, 2 ** draw.randint(13, 30))
        case 1:
            size, body = (2**15, 2**15), [chunk(b"IDAT", zlib.compress(bytes(2**24), 9))]
        case 2:
            body.insert(0, chunk(b"zTXt", b"a\0\0" + zlib.compress(bytes(2**27), 9)))
        case 3:
            body.insert(0, chunk(b"iCCP", b"a\0\0" + zlib.compress(bytes(2**27), 9)))
        case _:
            body = [chunk(b"acTL", struct.pack(">II", 2**31 - 1, 0)), *body]
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", *size, 8, 2, 0, 0, 0))
    file.write_bytes(b"\x89PNG\r\n\x1a\n" + head + b"".join(body) + chunk(b"IEND", b""))
    if draw.random() < 0.4:
        from PIL import Image

        file = folder / "a.gif"
        Image.new("P", (draw.choice([1, 60_000]), 1)).save(file)
        raw = bytearray(file.read_bytes())
        raw[6:10] = struct.pack("<HH", 65535, 65535)
        file.write_bytes(raw)
    return images(folder, draw.choice([file, folder]))


@kind
def json_files(draw: Random, folder: Path) -> list[str]:
    """A config, an index, results of Ray Tune, a manifest: nested, wide, or with long numbers."""
    n = 2 ** draw.randint(14, 21)
    text = draw.choice(
        [
            "[" * n,
            '{"a":' * n,
            "[" + "1," * n + "1]",
            '{"a": ' + "9" * n + "}",
            '{"a": "' + "x" * n + '"}',
            "{" + ",".join(f'"a{i}":{{}}' for i in range(n // 8)) + "}",
        ]
    )
    name = draw.choice(["config.json", "model.safetensors.index.json", "population.json", "result.json", "params.json"])
    folder = folder / ("a.pop" if name == "population.json" else "a")
    folder.mkdir()
    (folder / name).write_text(text)
    if name == "config.json":
        (folder / "model.safetensors").write_bytes(struct.pack("<Q", 2) + b"{}")
    if name in ("result.json", "params.json"):
        (folder / "result.json").write_text(text if name == "result.json" else "{}")
        (folder / "checkpoint_000001").mkdir()
        (folder / "checkpoint_000001" / "checkpoints").write_bytes(b"PK")
        return ["import", str(folder), "-o", "out.pop"]
    return ["inspect", str(folder)]


def resident(process: int) -> int:
    """Bytes in memory."""
    return int(Path(f"/proc/{process}/statm").read_text().split()[1]) * resource.getpagesize()


def outcome(seed: int, folder: Path, name: str) -> str:
    """The verdict of a random case: "said" and the line, "read", or what is wrong with it."""
    draw = Random(seed)
    folder.mkdir()
    here = Path.cwd()
    os.chdir(folder)
    try:
        arguments = KINDS[name](draw, folder)
    finally:
        os.chdir(here)
    small = sum(file.stat().st_blocks * 512 for file in folder.rglob("*") if file.is_file())
    before = resident(os.getpid())
    process = os.fork()
    if not process:
        _run(arguments, folder)
    began, found = time.monotonic(), 0
    while not found and time.monotonic() - began < 20 * SECONDS and resident(process) - before < 8 * BYTES:
        found, status, used = os.wait4(process, os.WNOHANG)
        time.sleep(0.005)
    if not found:
        size = resident(process) - before
        os.kill(process, 9)
        os.waitpid(process, 0)
        return f"WRONG still runs, {size >> 20} MB: {arguments}"
    seconds, grown = used.ru_utime + used.ru_stime, used.ru_maxrss * 1024 - before
    text = (folder / ".said").read_text(errors="replace")
    code = os.waitstatus_to_exitcode(status)
    said = f"{code}, {seconds:.1f} s, {grown >> 20} MB, from {small >> 10} kB: "
    said += f"{' '.join(map(str, arguments))[:150]}: {text[-400:]}"
    lines = [line for line in text.splitlines() if line.strip()]
    wrong = code not in (0, 1, 2, 3, 4) or "internal error" in text or "Traceback" in text
    if code and not wrong:
        wrong = len([line for line in lines if line.startswith("weightscope")]) != 1 or len(lines[-1]) > 1600
    if wrong or seconds > SECONDS or grown > BYTES:
        return f"WRONG {said}"
    return ("read " if code == 0 else "said ") + said


def _run(arguments: list[str], folder: Path) -> None:
    """Run a command in this process, which ends; its output goes to a file."""
    from weightscope.cli import main

    os.chdir(folder)
    out = os.open(".said", os.O_WRONLY | os.O_CREAT)
    for stream in (1, 2):
        os.dup2(out, stream)
    sys.stdout, sys.stderr = (os.fdopen(stream, "w") for stream in (1, 2))  # not those of pytest
    resource.setrlimit(resource.RLIMIT_AS, (64 * 2**30, 64 * 2**30))
    resource.setrlimit(resource.RLIMIT_CPU, (int(3 * SECONDS), int(3 * SECONDS)))
    code = 99
    try:
        main(arguments)
    except SystemExit as stopped:
        code = int(stopped.code or 0)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def preload() -> None:
    """Import what commands do, so that only the growth by a case is measured."""
    import pandas  # noqa: F401
    import PIL.Image  # noqa: F401
    import torch

    import weightscope.analysis.attention_maps
    import weightscope.auditing
    import weightscope.benchmarking
    import weightscope.population.importing
    import weightscope.training.collection  # noqa: F401

    if importlib.util.find_spec("pyarrow"):
        import pyarrow.parquet  # noqa: F401
    torch.set_num_threads(1)
