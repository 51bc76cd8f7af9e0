"""Clusters on this machine for tests: two workers of each backend, and what kills them."""

import contextlib
import gc
import json
import os
import random
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path

import psutil
import pytest

from weightscope._util.workers import Workers

HERE = Path(__file__).parent
TORTURE = bool(os.environ.get("TORTURE"))
"""Whether to run what takes minutes, too: `make torture`."""

torture = pytest.mark.skipif(not TORTURE, reason="takes minutes; set TORTURE=1")


def _python_path():
    return os.pathsep.join(filter(None, (str(HERE), os.environ.get("PYTHONPATH"))))


@contextlib.contextmanager
def two_workers(backend):
    """Two processes of a backend, which can import the modules of the tests; skips where its package is missing."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", _python_path())
        patch.setenv("RAY_raylet_start_wait_time_s", "240")
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        if backend == "loky":
            yield Workers("loky", 2)
        elif backend == "dask":
            distributed = pytest.importorskip("distributed", reason="the extra `dask` is not installed")
            with distributed.LocalCluster(n_workers=2, threads_per_worker=2, dashboard_address=":0") as cluster:
                cluster.adapt(minimum=2, maximum=2)  # a worker that is killed while it starts is not started again
                yield Workers("dask", scheduler=cluster.scheduler_address)
        else:
            ray = pytest.importorskip("ray", reason="the extra `ray` is not installed")
            ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
            try:
                yield Workers("ray")
            finally:
                ray.shutdown()
                with warnings.catch_warnings(action="ignore"):
                    gc.collect()  # ray does not wait for the processes that it started


def worker_processes(backend):
    """The processes that run tiles, of this process or of its cluster."""
    # "ray::_": tasks and actors; not ray's own agents, whose death ends the node and with it this process
    marks = {"loky": "loky", "dask": "spawn_main", "ray": "ray::_"}
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            command = " ".join(process.cmdline())
            if marks[backend] in command and "resource_tracker" not in command:
                found.append(process)
    return found


@contextlib.contextmanager
def killing(backend, kills, pause, seed):
    """Kill random workers while the block runs, at most `kills` of them; yields the killed processes' ids."""
    moments, over, killed = random.Random(seed), threading.Event(), []

    def kill():
        while len(killed) < kills and not over.wait(moments.uniform(*pause)):
            there = worker_processes(backend)
            if there:
                victim = moments.choice(there)
                with contextlib.suppress(psutil.Error):
                    victim.kill()
                    killed.append(victim.pid)

    killer = threading.Thread(target=kill, daemon=True)
    killer.start()
    try:
        yield killed
    finally:
        over.set()
        killer.join()


def runs(process):
    """Whether a process exists and is not a zombie."""
    try:
        return psutil.Process(process).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_until(happened):
    """Wait for something to happen, or fail after two minutes."""
    until = time.monotonic() + 120
    while not happened():
        assert time.monotonic() < until, "waited in vain"
        time.sleep(0.05)


@contextlib.contextmanager
def dask_processes(folder, workers):
    """A scheduler and workers without nannies as processes of their own, which tests may kill or stop."""
    file, quiet = folder / f"scheduler-{time.monotonic_ns()}.json", subprocess.DEVNULL
    started = []

    def start(*arguments):
        command = [sys.executable, "-m", "distributed.cli." + arguments[0], *arguments[1:]]
        process = subprocess.Popen(command, stderr=quiet, env=os.environ | {"PYTHONPATH": _python_path()})
        started.append(process)
        return process

    try:
        scheduler = start("dask_scheduler", "--port", "0", "--no-dashboard", "--scheduler-file", str(file))
        wait_until(lambda: file.exists() and file.read_text().strip().endswith("}"))
        options = ("--no-nanny", "--nthreads", "1", "--no-dashboard", "--scheduler-file", str(file))
        there = [start("dask_worker", *options, "--local-directory", str(folder)) for _ in range(workers)]
        yield json.loads(file.read_text())["address"], scheduler, there
    finally:
        for process in started:
            process.kill()
            process.wait()
