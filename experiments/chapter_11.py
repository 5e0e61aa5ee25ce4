"""Chapter 11: a text on one process, and on two."""

import concurrent.futures
import itertools
import os
import tempfile

import torch
import torch.distributed as dist

from experiments.runner import from_notebook

CHAPTER = "11_scaling_out"


def two_processes(turns=11):
    """A text on one process, then half of it on each of two: times of forward and backward."""
    wall, work = {}, {}
    for pattern, length in itertools.product("SA", (512, 2048, 4096)):
        with tempfile.TemporaryDirectory() as folder:
            jobs = [(rank, f"{folder}/meeting", pattern, length, turns) for rank in (0, 1)]
            with concurrent.futures.ProcessPoolExecutor(2) as pool:
                running = [pool.submit(timed_on, *job) for job in jobs]
                rank_0, rank_1 = (job.result() for job in running)
        turns_of_both = list(zip(rank_0, rank_1, strict=True))
        for seconds, kind in ((wall, 0), (work, 1)):  # of the slower rank
            slower = [round(max(one[kind], other[kind]), 5) for one, other in turns_of_both]
            seconds.setdefault(pattern, {})[length] = slower
    return {"turns": turns, "cores": os.cpu_count(), "wall": wall, "busiest rank": work}


def timed_on(rank, meeting, pattern, length, turns):
    """What chapter 11 measures on one of two ranks; the first turns of both kinds are left out."""
    timed = from_notebook(CHAPTER).timed
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(meeting, 2), rank=rank, world_size=2)
    return timed(rank, pattern, length, turns + 1)[2:]


RECIPES = {"11_two_processes": two_processes}
