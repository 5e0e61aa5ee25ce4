"""SSD on a sequence that is cut over several processes, the ranks of torch.distributed.

Every rank holds a contiguous slice of the tokens, in the order of the ranks. A slice acts on the
state that it is handed as one token does:

    state ← exp(A Σ dt) · state + what the slice writes into an empty state

So each rank goes through its slice from an empty state, all ranks exchange these two parts in one
collective whose size does not depend on the number of tokens, and each works out the state that it
should have been handed and adds what its tokens read of it.

Losses are understood as summed over the ranks, and gradients are those of that sum. The backward
pass communicates too, so all ranks must run it; a rank that has no loss of its own takes
`(0 * y).sum()`. What requires a gradient on one rank has to on all.

Source: Dao and Gu (2024), Mamba-2, §8.2; Sun et al. (2025), LASP-2, for linear attention.
"""

import copy
import functools
import math

import torch
import torch.distributed as dist
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, einsum, nn

from cheems_ref import check
from cheems_ref.attention import QCAttn
from cheems_ref.convolution import short_convolution
from cheems_ref.model import CausalLM
from cheems_ref.rope import RotaryTable
from cheems_ref.ssd import (
    SSD,
    Backend,
    Keys,
    PerHead,
    State,
    Steps,
    Values,
    _check,
    _pad,
    _ssd,
    expand_groups,
)


def ssd_sequence_parallel(
    x: Values,
    dt: Steps,
    A: PerHead,
    B: Keys,
    C: Keys,
    *,
    D: PerHead | None = None,
    chunk_size: int = 64,
    initial_state: State | None = None,
    group: dist.ProcessGroup | None = None,
    backend: Backend = "auto",
) -> tuple[Values, State]:
    """Compute SSD on this rank's slice of a sequence, as if all ranks' slices were one.

    Args:
        x, dt, B, C: this rank's slice, as in `ssd_recurrent`; l may differ from rank to rank, and
            be 0. All other sizes are the same on every rank.
        A, D, initial_state: the same on every rank, as in `ssd_recurrent`, and so are their
            gradients; the initial state is that before the first token of rank 0.
        chunk_size, backend: as in `ssd`.
        group: the processes that share the sequence; None for all there are.

    Returns:
        y of this slice, and the state after the last token of the last rank, on every rank.

    Raises:
        RuntimeError: torch.distributed is not initialised, or this process is not in the group.
        ValueError, TypeError: as `ssd`, on the rank whose arguments are wrong; the others wait for
            it until it ends, or for the group's timeout.
    """
    _place(group)
    _check(x, dt, A, B, C, D, initial_state=initial_state)
    check.sizes(chunk_size=chunk_size)
    check.choice(Backend, backend=backend)
    A, D, initial_state = (
        t if t is None else _Shared.apply(t, group) for t in (A, D, initial_state)
    )
    return _cut_ssd(x, dt, A, B, C, D, chunk_size, initial_state, backend, group)


def _cut_ssd(x, dt, A, B, C, D, chunk_size, state, backend, group):
    """`ssd_sequence_parallel`, unchecked, with the gradients of A, D and state left per rank."""
    (rank, ranks), length = _place(group), x.shape[1]
    if not length:  # a token with dt = 0 changes nothing, and keeps this rank in the backward pass
        x, dt, B, C = (_pad(t, 1) for t in (x, dt, B, C))

    # 1. This slice alone, from an empty state; and the log decay up to each of its tokens.
    y, own = _ssd(x, dt, A, B, C, D, chunk_size, None, backend)
    log_decay = (dt.to(own.dtype) * A).cumsum(1)

    # 2. The pair (state, log decay) of every rank, on every rank.
    pair = torch.cat([own.flatten(2), log_decay[:, -1, :, None]], dim=-1)
    pairs = _Gather.apply(pair, group)

    # 3. The recurrence over ranks.
    states = [torch.zeros_like(own) if state is None else state]
    for pair in pairs:
        write, decay = pair[..., :-1].unflatten(-1, own.shape[2:]), pair[..., -1].exp()
        states.append(decay[..., None, None] * states[-1] + write)
    incoming, final_state = states[rank], states[ranks]

    # 4. What each token reads of the state that its rank was handed. Rank 0 uses no pair, and if
    #    its y were returned by itself, it would not enter the collective of the backward pass, and
    #    the others would wait.
    C = expand_groups(C, x.shape[2]).to(own.dtype)
    y = y + einsum("blh,blhn,bhpn->blhp", log_decay.exp(), C, incoming)
    return _Joined.apply(y.to(x.dtype)[:, :length], final_state)


class SequenceParallel(nn.Module):
    """A language model whose text is cut over the ranks: each reads its slice of every row.

    S exchanges pairs (state, log decay), and with position="conv" the last tokens of a slice. A and
    I gather the keys and values of all ranks, since torch's own context parallel has no form for
    CPUs: what a rank holds of them grows with the whole text. Padding is not taken, nor a cache.

    Args:
        model: the same on every rank, and left as it is: the reader has layers of its own, with the
            model's parameters. Each of these gets, on every rank, the part of its gradient that
            passes through the rank's slice: `sum_gradients` adds the parts up.
        group: the processes that share the text; None for all there are.
    """

    def __init__(self, model: CausalLM, group: dist.ProcessGroup | None = None):
        super().__init__()
        _place(group)
        if not isinstance(model, CausalLM):
            raise TypeError(f"model must be a CausalLM, got {type(model).__name__}")
        shared = {id(t): t for t in (*model.parameters(), *model.buffers())}
        self.model, self.group = copy.deepcopy(model, shared), group
        for layer in self.model.modules():
            if isinstance(layer, SSD):
                layer._scan = functools.partial(_scan, group)
                layer._convolve = functools.partial(_convolve, group)
            elif isinstance(layer, QCAttn):
                layer._read = functools.partial(_read, group, layer._read)

    def forward(self, input_ids: Int[Tensor, "b l"]) -> Float[Tensor, "b l v"]:
        """Compute the logits of the token after each token of this rank's slice.

        Args:
            input_ids: this rank's slice of the rows, in [0, vocab_size); l may differ from rank to
                rank, and be 0.

        Raises:
            ValueError: on every rank, where the ids of one are wrong, or the ranks' numbers of rows
                differ, or the text is longer than the table of mask="gate".
        """
        rank, _ = _place(self.group)
        lengths = self._checked(input_ids)
        positions = sum(lengths[:rank]) + torch.arange(lengths[rank], device=input_ids.device)
        positions = positions.expand(len(input_ids), -1)
        x, rotary = self.model.embedding(input_ids.long()), RotaryTable(positions)
        for block in self.model.blocks:
            x, _ = block(x, positions, use_cache=False, rotary=rotary)
        return self.model.logits(self.model.norm(x))

    def _checked(self, input_ids):
        """The numbers of tokens of all ranks; refused on all of them if one has other than ids."""
        error = None
        try:
            check.token_ids(self.model.config.vocab_size, input_ids=input_ids)
        except ValueError as wrong:
            error = wrong
        rows, length = (-1, 0) if error else input_ids.shape
        told = _numbers([rows, length], input_ids.device, self.group)
        if error:
            raise error
        if wrong := [rank for rank, (rows, _) in enumerate(told) if rows < 0]:
            raise ValueError(f"input_ids are wrong on rank {', '.join(map(str, wrong))}")
        if len({rows for rows, _ in told}) > 1:
            raise ValueError(f"input_ids have {[rows for rows, _ in told]} rows on the ranks")
        lengths = [length for _, length in told]
        self.model._check_positions(sum(lengths))
        return lengths


@torch.no_grad()
def sum_gradients(model: nn.Module, group: dist.ProcessGroup | None = None) -> None:
    """Add up the gradients of a model's parameters over the ranks, in place.

    Once for each update: after its last backward pass, and before clipping and the optimiser. What
    has no gradient on any rank keeps none.
    """
    _place(group)
    parameters = list(model.parameters())
    if not parameters:
        return
    have = torch.tensor([p.grad is not None for p in parameters], device=parameters[0].device).int()
    dist.all_reduce(have, group=group)
    for parameter, somewhere in zip(parameters, have.tolist(), strict=True):
        if somewhere:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad, group=group)


def _scan(group, *arguments):
    """In place of `_ssd`, for a layer whose parameters' gradients are added up outside."""
    return _cut_ssd(*arguments, group)


def _convolve(group, u, weight, **_):
    """In place of `short_convolution`: its history is what the ranks before have last."""
    (rank, _), count = _place(group), weight.shape[1] - 1
    tail = u[:, max(0, u.shape[1] - count) :]
    before = _all_tokens(tail, group, until=rank)
    history = F.pad(before, (0, 0, count, 0))[:, before.shape[1] :]
    return short_convolution(u, weight, history=history)


def _read(group, read, q, cache):
    """In place of a layer's own reading: from what all ranks up to this one have cached."""
    until = _place(group)[0] + 1
    k, v, positions = (
        _all_tokens(t, group, until=until) for t in (cache.k, cache.v, cache.position_ids)
    )
    return read(q, cache._replace(k=k, v=v, position_ids=positions))


def _all_tokens(t, group, *, until):
    """The tokens (b, l, ...) of the ranks before `until`, one after the other.

    All ranks' tokens are gathered, and then some left out: so each rank takes part backward.
    """
    lengths = [length for (length,) in _numbers([t.shape[1]], t.device, group)]
    pieces = _Gather.apply(_pad(t, max(lengths) - t.shape[1]), group)
    tokens = torch.cat([piece[:, :n] for piece, n in zip(pieces, lengths, strict=True)], dim=1)
    return tokens[:, : sum(lengths[:until])]


def _numbers(mine, device, group):
    """A few whole numbers of every rank: a list for each."""
    told = torch.empty(_place(group)[1] * len(mine), dtype=torch.int64, device=device)
    dist.all_gather_single(told, torch.tensor(mine, device=device), group=group)
    return told.view(-1, len(mine)).tolist()


# The backward pass of each of these is made of these, so that gradients have gradients.


class _Gather(torch.autograd.Function):
    """The tensors of all ranks, stacked; backward, the sum of what all ranks send to this one."""

    @staticmethod
    def forward(ctx, t, group):
        ctx.group = group
        sizes = dist.get_world_size(group), len(t)
        gathered = t.new_empty(math.prod(sizes), *t.shape[1:])
        dist.all_gather_single(gathered, t.contiguous(), group=group)
        return gathered.unflatten(0, sizes)

    @staticmethod
    def backward(ctx, gradient):
        return _Scatter.apply(gradient, ctx.group), None


class _Scatter(torch.autograd.Function):
    """Of tensors (ranks, ...), the sum of those that all ranks have for this one."""

    @staticmethod
    def forward(ctx, t, group):
        ctx.group = group
        mine = t.new_empty(t.shape[1:])
        dist.reduce_scatter_single(mine, t.flatten(0, 1).contiguous(), group=group)
        return mine

    @staticmethod
    def backward(ctx, gradient):
        return _Gather.apply(gradient, ctx.group), None


class _Shared(torch.autograd.Function):
    """A tensor that all ranks have: unchanged; backward, the sum of all ranks' gradients."""

    @staticmethod
    def forward(ctx, t, group):
        ctx.group = group
        return t.view_as(t)

    @staticmethod
    def backward(ctx, gradient):
        return _Sum.apply(gradient, ctx.group), None


class _Sum(torch.autograd.Function):
    """The sum of all ranks' tensors, on every rank; and so backward."""

    @staticmethod
    def forward(ctx, t, group):
        ctx.group = group
        total = t.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx, gradient):
        return _Sum.apply(gradient, ctx.group), None


class _Joined(torch.autograd.Function):
    """Two tensors, unchanged; backward, neither without the other.

    A rank whose loss has but one of them still goes through all that both were made of, and so
    through the same collectives as the other ranks.
    """

    @staticmethod
    def forward(ctx, y, state):
        return y.view_as(y), state.view_as(state)

    @staticmethod
    def backward(ctx, *gradients):
        return gradients


def _place(group):
    """This process's rank in the group, and the number of ranks."""
    if not (dist.is_available() and dist.is_initialized()):
        raise RuntimeError(
            "torch.distributed is not initialised: start the program with torchrun and call "
            "torch.distributed.init_process_group()"
        )
    rank = dist.get_rank(group)
    if rank < 0:
        raise RuntimeError("this process is not one of the group")
    return rank, dist.get_world_size(group)
