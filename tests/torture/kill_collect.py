"""SIGKILL `collect` at random moments until a population is there, again and again; compare every byte.

    python tests/torture/kill_collect.py --kills 200 --json results.json
    python tests/torture/kill_collect.py --kills 50 --url s3://bucket

With --url the populations are in an object store: without AWS_ENDPOINT_URL, in a server that is started for it.
Each kill hits the whole process group, as when a machine goes down. The trainer is the fake of the tests, which leaves
little to do but writing; the real one is killed in `kill_workers.py`.
"""

import os
import random
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import fake_training as fake
import stores
import test_crash as crash
from plain_torture import options, report

from weightscope._util.sources import location
from weightscope.population import Population


def in_the_middle_of_writing(path):
    """A temporary file, or a hash whose shard is not there yet, or two hashes for one shard."""
    found = fake.files(path)
    hashes = {name.removesuffix(".sha256"): text for name, text in found.items() if name.endswith(".sha256")}
    unfinished = any(name not in found or len(text.splitlines()) > 1 for name, text in hashes.items())
    return unfinished or any(name.endswith(".tmp") for name in found)


def main():
    given = options(__doc__, kills=200, seed=0, url="")
    if not given.url or "AWS_ENDPOINT_URL" in os.environ:
        return kill(given)
    with stores.s3_server() as server:
        os.environ.update(stores.environment(server.url))  # before the fork server starts
        return kill(given)


def kill(given):
    recipe, moments, begun = fake.recipe(networks=120), random.Random(given.seed), time.monotonic()
    kills = populations = half_written = 0
    with tempfile.TemporaryDirectory() as folder:
        place = location(given.url or folder)
        whole = place / "whole.pop"
        seconds = crash.finish(whole, recipe, "large")
        while kills < given.kills:
            path = place / f"{populations}.pop"
            for _ in range(min(10, given.kills - kills)):
                before = {str(file) for file in path.rglob("*")} if path.exists() else set()
                process = crash.start(path, recipe, "large")
                crash.wait_for(lambda: {str(file) for file in path.rglob("*")} - before, process)  # noqa: B023
                time.sleep(moments.uniform(0, seconds / 4))
                crash.kill_group(process)
                kills += 1
                half_written += in_the_middle_of_writing(path)
                Population(path, partial=True).verify()
            crash.finish(path, recipe, "large")
            if fake.files(path) != fake.files(whole):
                raise SystemExit(f"population {populations} differs from that of an undisturbed run")
            populations += 1
    found = {"kills": kills, "populations": populations, "killed while writing": half_written, "differences": 0}
    report(given.json, f"kill_collect{' in a store' * bool(given.url)}", found, time.monotonic() - begun)


if __name__ == "__main__":
    main()
