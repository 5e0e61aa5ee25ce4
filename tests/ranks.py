"""What is asked of training over several processes, on each of them; started by test_processes.py:

    torchrun --nproc-per-node 2 tests/ranks.py FOLDER

The properties of `HELD` are asked of the package, those of `MISTAKES` of copies with a mistake.
What came out is written to FOLDER/verdicts.json.
"""

import re
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from planting import mistakes, planted, stale
from torch.distributed.checkpoint import HuggingFaceStorageWriter
from training import a_model, a_text, ask_all, everything, names, same, trained

from cheems_lab import checkpoint, processes, runs, training
from cheems_ref import train
from cheems_ref.ssd import SSD
from cheems_ref.verify import check

ROOMS = (train, processes, runs, checkpoint, training)
RUN = dict(batch_size=5, max_grad_norm=0.1, precision="float32")  # five windows are uneven shares
ROUNDING = 1e-5


# --- runs -------------------------------------------------------------------------------------


def spread(m, parallel, **model):
    """A new model over all processes."""
    model = a_model(**model)
    getattr(m, "copied", {}).get("processes", processes).shard_model(model, parallel)
    return model


def whole(run):
    """All that a run holds, put together from all processes."""
    return {
        name: t.full_tensor() if hasattr(t, "full_tensor") else t
        for name, t in everything(run).items()
    }


def near(name, got, want):
    """What two runs hold and went through is equal but for rounding."""
    got, want = whole(got), whole(want)
    assert got.keys() == want.keys(), f"{name}: what is held is not the same"
    for key, t in want.items():
        rounding = ROUNDING if t.is_floating_point() else None
        check(f"{name}: {key}", got[key].to(t.dtype), t, tol=rounding)


# --- properties -------------------------------------------------------------------------------


def trains_as_one(m, folder, parallel, micro_batch_size=None, pattern="AM"):
    """Losses, evaluations, parameters and moments are those of one process."""
    model = spread(m, parallel, pattern=pattern)
    got = trained(m, model=model, micro_batch_size=micro_batch_size, **RUN)
    near(parallel, got, trained(training, model=a_model(pattern=pattern), **RUN))
    for name, t in everything(got).items():  # each process holds its part of it, or all
        if hasattr(t, "to_local"):
            held = torch.tensor(t.to_local().numel())
            dist.all_reduce(held)
            times = 1 if parallel == "sharded" else dist.get_world_size()
            assert held == times * t.numel(), f"{name}: {held} numbers of {t.numel()} are held"


def goes_on(m, folder, before, after):
    """A run that is stopped and goes on, spread otherwise, is one that was never stopped: to the
    last digit, if it is spread alike.
    """
    trained(m, folder, model=spread(m, before), stop=8, **RUN)
    dist.barrier()
    assert names(folder) == ["step-00000004", "step-00000008"]
    run = trained(m, folder, model=spread(m, after), **RUN)
    if before == after:
        never_stopped = trained(m, model=spread(m, before), **RUN)
        same(before, whole(run), whole(never_stopped))
    near(f"{before}, then {after}", run, trained(training, **RUN))
    assert names(folder) == ["step-00000008", "step-00000012"]


def goes_on_alone(m, folder, parallel):
    """One process goes on from what several wrote, and several from what one wrote."""
    parts, file = folder / "parts", folder / "file"
    trained(m, parts, model=spread(m, parallel), stop=8, **RUN)
    dist.barrier()
    if dist.get_rank() == 0:  # two in one folder would be in each other's way
        near("on one", trained(m, parts, **RUN), trained(training, **RUN))
        assert names(parts) == ["step-00000008", "step-00000012"]
        trained(m, file, stop=8, **RUN)
    dist.barrier()
    run = trained(m, file, model=spread(m, parallel), **RUN)
    near("on several", run, trained(training, **RUN))


def damage_is_refused(m, folder):
    """A byte of a part, a part that is missing, another record: on every process."""
    trained(m, folder, model=spread(m, "sharded"), **RUN)
    last = folder / "step-00000012"
    part, record = sorted(last.glob("*.safetensors"))[1], last / "record.json"
    content, written = part.read_bytes(), record.read_bytes()
    for path, right, wrong in (
        (part, content, content[:-1] + bytes([content[-1] ^ 1])),
        (part, content, None),
        (record, written, written.replace(b'"seed": 0', b'"seed": 7')),
    ):
        dist.barrier()
        if dist.get_rank() == 0:
            path.unlink() if wrong is None else path.write_bytes(wrong)
        dist.barrier()
        with pytest.raises(checkpoint.CheckpointError, match=str(last)):
            checkpoint.load_model(folder)
        dist.barrier()
        if dist.get_rank() == 0:
            path.write_bytes(right)
    dist.barrier()
    checkpoint.load_model(folder)


def what_one_cannot_write_stops_all(m, folder):
    """A process whose part cannot be written: all say so, and the last checkpoint is whole."""
    trained(m, folder, model=spread(m, "sharded"), stop=4, **RUN)
    write = HuggingFaceStorageWriter.write_data

    def full(*_):
        raise OSError("no space left")

    HuggingFaceStorageWriter.write_data = full if dist.get_rank() == 1 else write
    try:
        with pytest.raises(OSError, match=r"step 8 cannot be written.*step-00000004"):
            trained(m, folder, model=spread(m, "sharded"), **RUN)
        dist.barrier()
        assert not [*folder.glob("partial-*")], "what was begun stays"
    finally:
        HuggingFaceStorageWriter.write_data = write
    run = trained(m, folder, model=spread(m, "sharded"), **RUN)
    near("after it", run, trained(training, **RUN))


def processes_agree_before_they_begin(m, folder):
    """Another text, other settings, weights or directory in one process, or a process without a
    window: refused by all.
    """
    rank = dist.get_rank()

    def begin(directory=None, parallel="data", **other):
        trained(m, directory, model=spread(m, parallel), stop=1, **RUN | other)

    other = "process 1 has other"
    for said, ask in {
        f"{other} .*text": lambda: begin(ids=a_text(seed=rank)),
        f"{other} .*settings": lambda: begin(max_grad_norm=1.0 + rank),
        f"{other} .*weights": lambda: processes.shard_model(a_model(rank), "data"),
        f"{other} .*directory": lambda: begin(folder / str(rank)),
        "is too few for": lambda: begin(parallel="sharded", batch_size=1),
    }.items():
        with pytest.raises(ValueError) as error:
            ask()
        assert re.search(said, str(error.value)), f"{said}: {error.value}"
        dist.barrier()


def bfloat16_keeps_what_is_small(m, folder):
    """Autocast is near; A and the step size's bias are in float32 where they are used."""
    model, used = dict(pattern="SM", d_model=16), set()
    cut = spread(m, "sharded", **model)
    for layer in cut.modules():
        if isinstance(layer, SSD):
            layer.register_forward_pre_hook(
                lambda ssd, _: used.update({ssd.A_log.dtype, ssd.dt_bias.dtype})
            )
    run = trained(m, model=cut, **RUN | dict(precision="bfloat16"))
    assert used == {torch.float32}, f"A and the bias in {used}"
    alone = trained(training, model=a_model(**model), **RUN | dict(precision="bfloat16"))
    check("bfloat16", *(torch.tensor(r.losses) for r in (run, alone)), tol=2e-3)


HELD = [
    (trains_as_one, "sharded"),
    (trains_as_one, "data", 2),
    (trains_as_one, "sharded", 1, "SEIK"),
    (goes_on, "sharded", "data"),
    (goes_on, "data", "sharded"),
    (goes_on, "sharded", "sharded"),
    (goes_on_alone, "sharded"),
    (damage_is_refused,),
    (what_one_cannot_write_stops_all,),
    (processes_agree_before_they_begin,),
    (bfloat16_keeps_what_is_small,),
]

# fmt: off
MISTAKES = mistakes([
    (trains_as_one, "sharded", {
        "all read the first share": [
            ("mine = windows.tensor_split(world_size)[rank].to(device)\n        largest",
             "mine = windows.tensor_split(world_size)[0].to(device)\n        largest")],
        "uneven shares count alike": [
            ("world_size / n_targets * summed", "summed / max(1, mine[:, 1:].numel())")],
        "each clips its own part": [
            ("parameters = self.model.parameters()",
             "parameters = [_local(p) for p in self.model.parameters()]"),
            ("def start(", "def _local(p):\n"
             "    own = p.detach().to_local()\n"
             "    own.grad = p.grad.to_local()\n"
             "    return own\n\n\ndef start(")]}),
    (bfloat16_keeps_what_is_small, {
        "all are cast": [
            ("    from torch.distributed.fsdp import fully_shard\n",
             "    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard\n"
             "    cast = MixedPrecisionPolicy(param_dtype=torch.bfloat16)\n"),
            ("fully_shard(block, mesh=mesh)", "fully_shard(block, mesh=mesh, mp_policy=cast)")]}),
])
# fmt: on


if __name__ == "__main__":
    torch.set_num_threads(1)
    processes.init_processes(torch.device("cpu"))
    to = Path(sys.argv[1])
    rows = [(f"{row[0].__name__}, {row[1:]}", training, *row) for row in HELD]
    rows += [
        (f"planted: {mistake.title}", planted(ROOMS, mistake.edits), mistake.has_property,
         *mistake.arguments)
        for mistake in MISTAKES if not stale(mistake, ROOMS)
    ]  # fmt: skip
    questions = {}
    for i, (title, m, has_property, *arguments) in enumerate(rows):
        (to / str(i)).mkdir(exist_ok=True)
        questions[title] = partial(has_property, m, to / str(i), *arguments)
    ask_all(questions, to)
