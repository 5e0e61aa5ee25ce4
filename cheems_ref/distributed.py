"""SSD on a sequence that is cut over several processes, the ranks of torch.distributed.

Every rank holds a contiguous slice of the tokens, in the order of the ranks. A slice acts on its
incoming state just as a single token does:

    state ← exp(A Σ dt) · state + the state that the slice writes when it starts from zeros

So each rank runs its slice from an empty state. All ranks exchange these two parts in one
collective, whose size does not depend on the number of tokens. Each rank then computes its incoming
state and adds what its tokens read from it.

The loss is the sum of the losses of all ranks, and gradients are gradients of this sum. The
backward pass communicates as well, so all ranks must run it; a rank without a loss uses
`(0 * y).sum()`. A tensor that requires a gradient on one rank must require it on all ranks.

Source: Dao and Gu (2024), Mamba-2, §8.2; Sun et al. (2025), LASP-2, for linear attention.
"""

import copy

import torch
import torch.distributed as dist
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, einsum, nn

from cheems_ref import check, ssd
from cheems_ref.attention import QCAttn
from cheems_ref.convolution import short_convolution
from cheems_ref.model import CausalLM, Ids, check_positions, positions
from cheems_ref.rope import RotaryTable
from cheems_ref.ssd import SSD, Backend, Keys, PerHead, State, Steps, Values


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
            gradients. The initial state precedes the first token of rank 0.
        chunk_size, backend: as in `ssd`.
        group: the processes that share the sequence; None for all processes.

    Returns:
        y of this slice, and the state after the last token of the last rank, on every rank.

    Raises:
        RuntimeError: torch.distributed is not initialised, or this process is not in the group.
        ValueError, TypeError: as in `ssd`, on the rank whose arguments are wrong; the others wait
            until it ends, or for the group's timeout.
    """
    ssd._check(x, dt, A, B, C, D, chunk_size=chunk_size, initial_state=initial_state)
    check.choice(Backend, backend=backend)
    A, D, state = (
        t if t is None else _Collective.apply(t, _share, group) for t in (A, D, initial_state)
    )
    return _cut_ssd(x, dt, A, B, C, D, chunk_size, state, backend, group)


def _cut_ssd(x, dt, A, B, C, D, chunk_size, state, backend, group):
    """`ssd_sequence_parallel` without checks; the gradients of A, D and state stay per rank."""
    (rank, ranks), length = _rank_and_size(group), x.shape[1]
    if not length:  # a token with dt = 0 changes nothing, and keeps this rank in the backward pass
        x, dt, B, C = (ssd._pad(t, 1) for t in (x, dt, B, C))

    # 1. This slice alone, from an empty state; and the log decay up to each of its tokens.
    y, own = ssd._ssd(x, dt, A, B, C, D, None, chunk_size, backend)
    log_decay = (dt.to(own.dtype) * A).cumsum(1)

    # 2. The pair (state, log decay) of every rank, on every rank.
    pair = torch.cat([own.flatten(2), log_decay[:, -1, :, None]], dim=-1)
    pairs = _Collective.apply(pair, _gather, group)

    # 3. The recurrence over ranks.
    states = [torch.zeros_like(own) if state is None else state]
    for pair in pairs:
        write, decay = pair[..., :-1].unflatten(-1, own.shape[2:]), pair[..., -1].exp()
        states.append(decay[..., None, None] * states[-1] + write)
    incoming, final_state = states[rank], states[ranks]

    # 4. The read of each token from the incoming state of its rank. Rank 0 uses no pair: a y that
    #    were returned without the final state would leave out the collective of the backward pass,
    #    and the other ranks would wait.
    C = ssd.expand_groups(C, x.shape[2]).to(own.dtype)
    y = y + einsum("blh,blhn,bhpn->blhp", log_decay.exp(), C, incoming)
    return _Joined.apply(y.to(x.dtype)[:, :length], final_state)


class SequenceParallel(nn.Module):
    """A language model whose text is cut over the ranks: each rank reads a slice of every row.

    S exchanges pairs (state, log decay), and with position="conv" the last tokens of a slice. A and
    I gather the keys and values of all ranks, since torch's own context parallel does not run on
    CPUs: their memory per rank grows with the whole text. Neither padding nor a cache is supported.

    Args:
        model: the same on every rank. It stays as it is: its layers are copied and share their
            parameters with it. On every rank a parameter gets the part of its gradient that passes
            through the rank's slice; `sum_gradients` adds the parts up.
        group: the processes that share the text; None for all processes.
    """

    def __init__(self, model: CausalLM, group: dist.ProcessGroup | None = None):
        super().__init__()
        _rank_and_size(group)
        if not isinstance(model, CausalLM):
            raise TypeError(f"model must be a CausalLM, got {type(model).__name__}")
        shared = {id(t): t for t in (*model.parameters(), *model.buffers())}
        self.model, self.group = copy.deepcopy(model, shared), group
        for layer in self.model.modules():
            for kind, sliced in ((SSD, _SlicedSSD), (QCAttn, _SlicedAttention)):
                if isinstance(layer, kind):  # as torch's fully_shard changes a module's class
                    layer.__class__ = type(sliced.__name__, (sliced, type(layer)), {})
                    layer.group = group

    def forward(self, input_ids: Ids) -> Float[Tensor, "b l v"]:
        """Compute the logits of the token after each token of this rank's slice.

        Args:
            input_ids: this rank's slice of the rows, in [0, vocab_size); l may differ from rank to
                rank, and be 0.

        Raises:
            ValueError: on every rank, if the ids of one rank are wrong, the ranks' numbers of rows
                differ, or the text is longer than the table of mask="gate".
        """
        rank, _ = _rank_and_size(self.group)
        lengths = self._check(input_ids)
        real = torch.ones_like(input_ids).bool()  # no padding
        before = real.new_full(real.shape[:1], sum(lengths[:rank]), dtype=torch.int64)
        position_ids = positions(real, before)
        x, rotary = self.model.embedding(input_ids.long()), RotaryTable(position_ids)
        for block in self.model.blocks:
            x, _ = block(x, position_ids, use_cache=False, rotary=rotary)
        return self.model.logits(self.model.norm(x))

    def _check(self, input_ids):
        """Validate the ids of all ranks, on all ranks, and return their numbers of tokens."""
        error = None
        try:
            check.token_ids(self.model.config.vocab_size, input_ids=input_ids)
        except ValueError as wrong:
            error = wrong
        shape = [-1, 0] if error else [*input_ids.shape]
        rows, lengths = zip(*_numbers(shape, input_ids.device, self.group), strict=True)
        if error:
            raise error
        if -1 in rows:
            raise ValueError(f"input_ids are wrong on rank {rows.index(-1)}")
        if len({*rows}) > 1:
            raise ValueError(f"input_ids have {[*rows]} rows on the ranks")
        check_positions(self.model.config, sum(lengths), "input_ids")
        return lengths


@torch.no_grad()
def sum_gradients(model: nn.Module, group: dist.ProcessGroup | None = None) -> None:
    """Add up the gradients of a model's parameters over the ranks, in place.

    Call it once per update, after the last backward pass and before clipping and the optimizer. A
    parameter without a gradient on any rank keeps none.
    """
    parameters = list(model.parameters())
    have = _numbers([int(p.grad is not None) for p in parameters], parameters[0].device, group)
    for parameter, counts in zip(parameters, zip(*have, strict=True), strict=True):
        if any(counts):
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad, group=group)


class _SlicedSSD:
    """An SSD layer whose parameters' gradients are added up by `sum_gradients`."""

    def _mix(self, x, dt, A, B, C, state):
        return _cut_ssd(x, dt, A, B, C, self.D, self.chunk_size, state, self.backend, self.group)

    def _convolve(self, u, weight, *, padding_mask, history):
        """Convolve with the last tokens of the ranks before as history."""
        (rank, _), count = _rank_and_size(self.group), weight.shape[1] - 1
        before = _all_tokens(u[:, max(0, u.shape[1] - count) :], self.group, until=rank)
        history = F.pad(before, (0, 0, count, 0))[:, before.shape[1] :]
        return short_convolution(u, weight, history=history)


class _SlicedAttention:
    """An attention layer that reads the keys and values of all ranks up to its own."""

    def _read(self, q, cache):
        until = _rank_and_size(self.group)[0] + 1
        k, v, positions = (
            _all_tokens(t, self.group, until=until) for t in (cache.k, cache.v, cache.position_ids)
        )
        return super()._read(q, cache._replace(k=k, v=v, position_ids=positions))


def _all_tokens(t, group, *, until):
    """Return the tokens (b, l, ...) of the ranks before `until`, joined.

    It gathers the tokens of all ranks and drops some: so each rank takes part backward.
    """
    lengths = [length for (length,) in _numbers([t.shape[1]], t.device, group)]
    pieces = _Collective.apply(ssd._pad(t, max(lengths) - t.shape[1]), _gather, group)
    tokens = torch.cat([piece[:, :n] for piece, n in zip(pieces, lengths, strict=True)], dim=1)
    return tokens[:, : sum(lengths[:until])]


def _numbers(mine, device, group):
    """Gather a few integers of every rank, as a list per rank."""
    return _gather(torch.tensor(mine, device=device), group).tolist()


class _Collective(torch.autograd.Function):
    """A collective; its backward pass is a collective too, so gradients have gradients."""

    @staticmethod
    def forward(ctx, t, collective, group):
        ctx.collective, ctx.group = collective, group
        return collective(t, group)

    @staticmethod
    def backward(ctx, gradient):
        return _Collective.apply(gradient, BACKWARD[ctx.collective], ctx.group), None, None


def _gather(t, group):
    """Stack the tensors of all ranks."""
    gathered = t.new_empty(_rank_and_size(group)[1], *t.shape)
    dist.all_gather_single(gathered.flatten(0, 1), t.contiguous(), group=group)
    return gathered


def _scatter(t, group):
    """Add up the tensors (ranks, ...) of all ranks, and give each rank its own entry of the sum."""
    mine = t.new_empty(t.shape[1:])
    dist.reduce_scatter_single(mine, t.flatten(0, 1).contiguous(), group=group)
    return mine


def _share(t, group):
    """Return a tensor that is the same on all ranks; its gradient is the sum over the ranks."""
    return t.view_as(t)


def _sum(t, group):
    """Sum the tensors of all ranks."""
    total = t.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


BACKWARD = {_gather: _scatter, _scatter: _gather, _share: _sum, _sum: _sum}


class _Joined(torch.autograd.Function):
    """Two unchanged tensors with one backward pass.

    A rank whose loss uses only one of them still takes part in all the collectives of both.
    """

    @staticmethod
    def forward(ctx, y, state):
        return y.view_as(y), state.view_as(state)

    @staticmethod
    def backward(ctx, *gradients):
        return gradients


def _rank_and_size(group):
    """Return this process's rank in the group, and the number of ranks."""
    if not (dist.is_available() and dist.is_initialized()):
        raise RuntimeError(
            "torch.distributed is not initialised: start the program with torchrun and call "
            "torch.distributed.init_process_group()"
        )
    rank = dist.get_rank(group)
    if rank < 0:
        raise RuntimeError("this process is not one of the group")
    return rank, dist.get_world_size(group)
