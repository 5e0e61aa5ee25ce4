"""SSD cut along the sequence: equal to one pass, with every gradient, for every cut.

Most tests run the ranks as threads of this process and exchange the tensors of the collectives
between threads, which distinguishes a missing rank from a slow one. The same comparisons run once
more with processes and gloo.
"""

import copy
import re
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from threading import BrokenBarrierError
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
import torch.nn.functional as F
import torch.utils.checkpoint
from properties import normal
from test_ssd import NAMES, inputs

import cheems_ref.distributed as distributed
from cheems_ref.config import ModelConfig
from cheems_ref.model import CausalLM
from cheems_ref.ssd import ssd_recurrent
from cheems_ref.verify import check

CUTS = ((13,), (4, 4, 4), (1, 0, 9, 3), (3, 1, 0))
IDS = torch.zeros(2, 3, dtype=torch.int64)
CUT_ALONG_L = (True, True, False, True, True, False, False)  # x, dt, A, B, C, D, state
MODELS = {
    "rope": ("SM", {}),
    "conv": ("SM", dict(position="conv")),
    "attention": ("AM", dict(n_kv_heads=2)),
    "inner SSD, content": ("SEIE", dict(inner="ssd", mask="content", k_keys=3)),
    "conv, gate": ("SAIR", dict(position="conv", mask="gate", max_positions=32)),
    "decay, untied": ("SGIC", dict(position="decay", inner="linear", tie_embeddings=False)),
}


class Threads:
    """The functions of torch.distributed that the module uses, between threads of one process."""

    ProcessGroup = dist.ProcessGroup

    def __init__(self, n):
        self.n, self.barrier, self.board = n, threading.Barrier(n), [None] * n
        self.here, self.calls = threading.local(), []

    def is_available(self):
        return True

    def is_initialized(self):
        return True

    def get_rank(self, group):
        return self.here.rank

    def get_world_size(self, group):
        return self.n

    def all_gather_single(self, out, t, group):
        assert out.is_contiguous() and t.is_contiguous()
        out.copy_(torch.cat(self.exchange("all_gather", t)).view_as(out))

    def reduce_scatter_single(self, out, t, group):
        assert out.is_contiguous() and t.is_contiguous()
        parts = [part.chunk(self.n)[self.here.rank] for part in self.exchange("scatter", t)]
        out.copy_(sum(parts).view_as(out))

    def all_reduce(self, t, group):
        assert t.is_contiguous()
        t.copy_(sum(self.exchange("all_reduce", t)))

    def exchange(self, kind, t):
        """Every rank's tensor; all ranks must be at the same call."""
        self.board[self.here.rank] = (kind, None if t is None else t.detach().clone())
        self.barrier.wait()
        kinds, tensors = zip(*self.board, strict=True)
        self.barrier.wait()
        assert len(set(kinds)) == 1, f"ranks are at different calls: {kinds}"
        if self.here.rank == 0:
            self.calls.append((kind, 0 if t is None else t.numel()))
        return tensors


def on_ranks(m, n, work):
    """work(rank) on n ranks, each a thread: the results, and what they said to one another."""
    threads = Threads(n)

    def run(rank):
        threads.here.rank = rank
        try:
            result = work(rank)
            threads.exchange("the end", None)
        except BaseException:
            threads.barrier.abort()
            raise
        return result

    with mock.patch.object(m, "dist", threads), ThreadPoolExecutor(n) as pool:
        futures = [pool.submit(run, rank) for rank in range(n)]
    for future in sorted(futures, key=lambda f: isinstance(f.exception(), BrokenBarrierError)):
        future.result()  # raises what went wrong, not what the others say to it
    return [future.result() for future in futures], threads.calls[:-1]


def slices(tensors, cut, rank):
    """One rank's slices of tensors in the order of NAMES."""
    pairs = zip(tensors, CUT_ALONG_L, strict=True)
    return [t.split(cut, 1)[rank] if along_l else t for t, along_l in pairs]


def leaves_of(tensors):
    """Copies to take gradients by."""
    return [t.detach().clone().requires_grad_() for t in tensors]


def one_pass(tensors, weigh_final=True):
    """y, the final state, and the gradients of a weighted sum of both."""
    x, dt, A, B, C, D, state = tensors = leaves_of(tensors)
    y, final = ssd_recurrent(x, dt, A, B, C, D=D, initial_state=state, return_final_state=True)
    loss = (y * normal(*y.shape, seed=5)).sum() + weigh_final * (
        final * normal(*final.shape, seed=5)
    ).sum()
    return y.detach(), final.detach(), torch.autograd.grad(loss, tensors)


def slice_agrees(m, tensors, cut, rank, group=None, weigh_final=True):
    """One rank's part of a sequence, compared with its slice of one pass."""
    y, final, gradients = one_pass(tensors, weigh_final)
    weights = normal(*y.shape, seed=5).split(cut, 1)[rank]

    x, dt, A, B, C, D, state = leaves = leaves_of(slices(tensors, cut, rank))
    got, got_final = m.ssd_sequence_parallel(
        x, dt, A, B, C, D=D, initial_state=state, chunk_size=4, group=group
    )
    loss = (got * weights).sum()
    if weigh_final:  # every rank has it, and losses are summed over ranks
        loss = loss + (got_final * normal(*final.shape, seed=5)).sum() / len(cut)
    found = torch.autograd.grad(loss, leaves)
    if x.numel():
        check("slice of the outputs", got.detach(), y.split(cut, 1)[rank])
    check("final state, on every rank", got_final.detach(), final)
    for name, mine, whole in zip(NAMES, found, slices(gradients, cut, rank), strict=True):
        if mine.numel():
            check(f"gradient of {name}", mine, whole)


def is_one_pass(m, cut, weigh_final=True):
    """If a loss uses y alone, only the incoming state connects a rank to the others."""
    tensors = inputs(l=sum(cut))
    on_ranks(m, len(cut), lambda rank: slice_agrees(m, tensors, cut, rank, weigh_final=weigh_final))


def says_little(m, length):
    """One collective forward, of a size that does not depend on the number of tokens."""
    tensors = inputs(l=3 * length)

    def work(rank):
        x, dt, A, B, C, *_ = slices(tensors, [length] * 3, rank)
        m.ssd_sequence_parallel(x, dt, A, B, C)

    _, calls = on_ranks(m, 3, work)
    (b, _, h, p), n = tensors[0].shape, tensors[3].shape[-1]
    assert calls == [("all_gather", b * h * (p * n + 1))], calls


def keeps_its_digits(m, dtype):
    """As near to float64 as one pass in the same dtype, over slices with a long memory."""
    tensors = inputs(l=1024, h=2, g=1, dt=1e-3, A=(-1, -0.5), dtype=dtype)
    x, dt, A, B, C, *_ = tensors
    truth = ssd_recurrent(*(t.double() for t in (x, dt, A, B, C)))
    alone = m.ssd._ssd(x, dt, A, B, C, None, None, 64, "chunked")[0]

    def work(rank):
        x, dt, A, B, C, *_ = slices(tensors, [256] * 4, rank)
        return m.ssd_sequence_parallel(x, dt, A, B, C)[0]

    pieces, _ = on_ranks(m, 4, work)
    got = torch.cat(pieces, 1)
    assert got.dtype == dtype
    errors = [((t.double() - truth).abs().max() / truth.abs().max()).item() for t in (got, alone)]
    most = max(2 * errors[1], {torch.float32: 1e-6, torch.bfloat16: 1e-2}[dtype])
    assert errors[0] <= most, f"{errors[0]:.1e}, one pass {errors[1]:.1e}"


def tiny(name, **more):
    torch.manual_seed(1)
    pattern, fields = MODELS[name]
    sizes = dict(d_model=32, n_heads=4, d_state=8, d_ff=16, n_neurons=16, chunk_size=4)
    return CausalLM(ModelConfig(pattern, **(sizes | fields | more))).double()


def model_slice_agrees(m, model, cut, rank, group=None):
    """One rank's slice of a text, and its parameters' gradients, compared with the whole's."""
    model = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(2)
    ids, targets = torch.randint(256, (2, 2, sum(cut)), generator=generator)
    logits, _ = model(ids)
    F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum").backward()
    own = copy.deepcopy(model)
    own.zero_grad()
    got = m.SequenceParallel(own, group)(ids.split(cut, 1)[rank])
    mine = targets.split(cut, 1)[rank]
    F.cross_entropy(got.flatten(0, 1), mine.flatten(), reduction="sum").backward()
    m.sum_gradients(own, group)
    if got.numel():
        check("slice of the logits", got.detach(), logits.detach().split(cut, 1)[rank])
    for (title, whole), part in zip(model.named_parameters(), own.parameters(), strict=True):
        check(f"gradient of {title}", part.grad, whole.grad)


def reads_as_the_whole(m, name, cut):
    model = tiny(name)  # here: threads share one generator
    on_ranks(m, len(cut), lambda rank: model_slice_agrees(m, model, cut, rank))


@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_slices_are_one_pass(cut):
    is_one_pass(distributed, cut)
    is_one_pass(distributed, cut, False)


def test_little_is_said_and_digits_are_kept():
    says_little(distributed, 40)
    for dtype in (torch.float32, torch.bfloat16):
        keeps_its_digits(distributed, dtype)


@pytest.mark.parametrize("name", MODELS)
def test_a_model_reads_as_the_whole_and_stays_as_it_was(name):
    """The reader copies the layers and shares the model's parameters."""
    reads_as_the_whole(distributed, name, (5, 3, 4))
    reads_as_the_whole(distributed, name, (0, 6, 0, 2))
    model, ids = tiny(name), torch.arange(6)[None]
    before, _ = model(ids)

    def work(rank):
        reader = distributed.SequenceParallel(model)
        pairs = zip(reader.parameters(), model.parameters(), strict=True)
        assert all(mine is its for mine, its in pairs)
        reader(ids)
        told = len(distributed.dist.calls)
        check("the model beside its reader", model(ids)[0], before)
        assert len(distributed.dist.calls) == told, "the model itself talks to other ranks"
        return [reader(ids[:0]).shape, reader(ids[:, :0]).shape]

    assert on_ranks(distributed, 1, work)[0] == [[(0, 6, 256), (1, 0, 256)]]


@pytest.mark.parametrize("use_reentrant", [None, False, True])
def test_gradients_are_added_up_once(use_reentrant):
    """Of several backward passes, also where blocks run again; none where no rank has one."""
    model = tiny("conv, gate")
    model.unused = torch.nn.Parameter(torch.ones(3))
    model.embedding.weight.requires_grad_(use_reentrant is True)  # which needs such an input
    texts = torch.randint(256, (2, 2, 6), generator=torch.Generator().manual_seed(6))
    for text in texts:
        model(text)[0].square().mean(0).sum().backward()
    want = [p.grad for p in model.parameters()]

    def again(forward, x, positions, **options):
        def run(x):
            return forward(x, positions, **options)[0]

        return torch.utils.checkpoint.checkpoint(run, x, use_reentrant=use_reentrant), None

    def work(rank):
        own = copy.deepcopy(model)
        own.zero_grad()
        reader = distributed.SequenceParallel(own)
        for block in reader.model.blocks if use_reentrant is not None else ():
            block.forward = partial(again, block.forward)
        for text in texts:
            reader(text.split((2, 4), 1)[rank]).square().mean(0).sum().backward()
        distributed.sum_gradients(own)
        return [p.grad for p in own.parameters()]

    for got in on_ranks(distributed, 2, work)[0]:
        for mine, its in zip(got, want, strict=True):
            assert (mine is None) == (its is None)
            if its is not None:
                check("sum of gradients", mine, its)


# --- what is refused ----------------------------------------------------------------------------


@pytest.mark.usefixtures("unchecked")
def test_without_a_group_it_says_how_to_get_one():
    for function, *arguments in (
        (distributed.ssd_sequence_parallel, *inputs()[:5]),
        (distributed.SequenceParallel, tiny("rope")),
        (distributed.sum_gradients, tiny("rope")),
    ):
        with pytest.raises(RuntimeError, match="start the program with torchrun"):
            function(*arguments)


@pytest.mark.usefixtures("unchecked")
def test_wrong_arguments_are_refused_before_anything_is_sent():
    good = dict(zip(NAMES, inputs()[:5], strict=False))

    def work(rank):
        for change in (dict(A=-good["A"]), dict(chunk_size=0), dict(backend="fast")):
            with pytest.raises(ValueError, match=f"{next(iter(change))} must be"):
                distributed.ssd_sequence_parallel(**good | change)
        with pytest.raises(TypeError, match="model must be a CausalLM, got Linear"):
            distributed.SequenceParallel(torch.nn.Linear(2, 2))

    _, calls = on_ranks(distributed, 1, work)
    assert not calls


@pytest.mark.usefixtures("unchecked")
def test_wrong_ids_are_refused_on_every_rank():
    """None is left waiting for one that has refused."""
    for ids, message, model in (
        ([IDS, IDS + 256], ["wrong on rank 1", "must be in"], tiny("rope")),
        ([IDS.double(), IDS], ["must be torch.int64", "wrong on rank 0"], tiny("rope")),
        ([IDS, IDS[:1]], [r"\[2, 1\] rows"] * 2, tiny("rope")),
        ([IDS, IDS], ["max_positions = 5"] * 2, tiny("conv, gate", max_positions=5)),
    ):

        def work(rank, ids=ids, message=message, model=model):
            with pytest.raises(ValueError, match=message[rank]):
                distributed.SequenceParallel(model)(ids[rank])

        on_ranks(distributed, 2, work)


# --- processes ----------------------------------------------------------------------------------


def with_gloo(rank, n, path):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=n)
    for cut in ((5, 8, 2), (0, 6, 1)):
        slice_agrees(distributed, inputs(l=sum(cut)), cut, rank)
        for name in ("attention", "conv, gate"):
            model_slice_agrees(distributed, tiny(name), cut, rank)
    outer = dist.new_group([0, 2])
    if rank == 1:
        x, dt, A, B, C, *_ = inputs()
        with pytest.raises(RuntimeError, match="not one of the group"):
            distributed.ssd_sequence_parallel(x, dt, A, B, C, group=outer)
    else:
        slice_agrees(distributed, inputs(l=9), (4, 5), rank // 2, outer)
        model_slice_agrees(distributed, tiny("conv"), (4, 5), rank // 2, outer)
    dist.destroy_process_group()


@pytest.mark.program
def test_with_processes(tmp_path):
    torch.multiprocessing.spawn(with_gloo, (3, tmp_path / "meeting"), nprocs=3)


@pytest.mark.program
def test_the_program_of_the_manual(tmp_path):
    """Both processes end with the gradient of one."""
    page = (Path(__file__).parents[1] / "book" / "manual" / "training.md").read_text()
    (program,) = re.findall(r"^import torch, torch.distributed.*?(?=^```)", page, re.M | re.S)
    path = tmp_path / "program.py"
    path.write_text(
        f"{program}\nmine = [p.grad.clone() for p in model.parameters()]\nmodel.zero_grad()\n"
        "torch.nn.functional.cross_entropy(\n"
        "    model(ids)[0].flatten(0, 1), targets.flatten(), reduction='sum'\n).backward()\n"
        "for got, parameter in zip(mine, model.parameters(), strict=True):\n"
        "    torch.testing.assert_close(got, parameter.grad, rtol=1e-3, atol=1e-2)\n"
        "dist.destroy_process_group()\n"
    )
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(path)]
    done = subprocess.run(torchrun, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
