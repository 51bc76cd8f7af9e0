"""What the torture scripts share: their options, and their results in one JSON file with their dates."""

import argparse
import datetime
import json
from pathlib import Path

from weightscope._util.environment import environment


def options(description, **defaults):
    """Parse `--NAME`, of the type of its default, for each name, and `--json`."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in defaults.items():
        parser.add_argument(f"--{name}", type=type(default), default=default)
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def report(file, name, found, seconds):
    """Print what a script found, and enter it in a file."""
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    entry = found | {"seconds": round(seconds), "date": today, "environment": environment("cpu")}
    print(f"{name}: " + ", ".join(f"{value} {key}" for key, value in found.items()) + f", {seconds:.0f} s")
    if file is not None:
        there = json.loads(file.read_text()) if file.exists() else {}
        file.write_text(json.dumps(there | {name: entry}, indent=1, sort_keys=True) + "\n")
