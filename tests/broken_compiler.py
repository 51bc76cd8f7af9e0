"""A C compiler that makes a mistake: `broken_compiler.py OLD NEW ARGUMENTS...` compiles with OLD replaced by NEW."""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path


def main(old: str, new: str, arguments: list[str]) -> int:
    compiler = next(name for name in ("cc", "gcc", "clang") if shutil.which(name))
    sources = [Path(argument) for argument in arguments if argument.endswith(".c")]
    with tempfile.TemporaryDirectory() as folder:
        for file in sources[0].parent.glob("*.[ch]") if sources else ():
            Path(folder, file.name).write_text(file.read_text().replace(old, new))
        here = [str(Path(folder, Path(a).name)) if a.endswith(".c") else a for a in arguments]
        quick = ["-O0" if argument == "-O3" else argument for argument in here]
        return subprocess.run([compiler, *quick], check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], sys.argv[3:]))
