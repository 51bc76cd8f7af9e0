"""Results of the torture scripts, in one JSON file with their dates."""

import datetime
import json

from weightscope._util.environment import environment


def report(file, name, found, seconds):
    """Print what a script found, and enter it in a file."""
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    entry = found | {"seconds": round(seconds), "date": today, "environment": environment("cpu")}
    print(f"{name}: " + ", ".join(f"{value} {key}" for key, value in found.items()) + f", {seconds:.0f} s")
    if file is not None:
        there = json.loads(file.read_text()) if file.exists() else {}
        file.write_text(json.dumps(there | {name: entry}, indent=1, sort_keys=True) + "\n")
