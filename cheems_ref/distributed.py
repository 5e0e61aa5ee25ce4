"""SSD on a sequence that is cut over several processes, the ranks of torch.distributed.

Every rank holds a contiguous slice of the tokens, in the order of the ranks. A slice acts on the
state that it is handed as one token does:

    state ← exp(A Σ dt) · state + what the slice writes into an empty state

So each rank goes through its slice from an empty state, all ranks exchange these two parts in one
collective whose size does not depend on the number of tokens, and each works out the state that it
should have been handed and adds what its tokens read of it.

Losses are understood as summed over the ranks: the gradient of a slice is that of the sum of all
ranks' losses, and what all ranks share has the whole gradient on every rank. The backward pass
communicates too, so all ranks must run it; a rank that has no loss of its own takes
`(0 * y).sum()`.

Source: Dao and Gu (2024), Mamba-2, §8.2; Sun et al. (2025), LASP-2, for linear attention.
"""

import contextlib

import torch
import torch.distributed as dist
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, einsum, nn

from cheems_ref import check
from cheems_ref.attention import QCAttn
from cheems_ref.convolution import short_convolution
from cheems_ref.model import CausalLM
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
            be 0.
        A, D, initial_state: the same on every rank, as in `ssd_recurrent`; the initial state is
            that before the first token of rank 0.
        chunk_size, backend: as in `ssd`.
        group: the processes that share the sequence; None for all there are.

    Returns:
        y of this slice, and the state after the last token of the last rank, on every rank.

    Raises:
        RuntimeError: torch.distributed is not initialised, or this process is not in the group.
        ValueError, TypeError: as `ssd`, on the rank whose arguments are wrong; the others wait for
            it in vain until the group's timeout.
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
    exact = torch.float32 if x.is_mps else torch.float64  # Apple's GPUs have no float64
    log_decay = (dt.to(exact) * A).cumsum(1)

    # 2. The pair (state, log decay) of every rank, on every rank.
    pair = torch.cat([own.flatten(2), log_decay[:, -1, :, None].to(own.dtype)], dim=-1)
    pairs = _Gather.apply(pair, group)

    # 3. The recurrence over ranks. The states are stacked before one is chosen: a rank that used
    #    no pair would not enter the collective of the backward pass, and the others would wait.
    states = [torch.zeros_like(own) if state is None else state]
    for pair in pairs:
        write, decay = pair[..., :-1].unflatten(-1, own.shape[2:]), pair[..., -1].exp()
        states.append(decay[..., None, None] * states[-1] + write)
    states = torch.stack(states)
    incoming, final_state = states[rank], states[ranks]

    # 4. What each token reads of the state that its rank was handed.
    decay, C = log_decay.exp().to(own.dtype), expand_groups(C, x.shape[2]).to(own.dtype)
    y = y + einsum("blh,blhn,bhpn->blhp", decay, C, incoming)
    return y.to(x.dtype)[:, :length], final_state


class SequenceParallel(nn.Module):
    """A language model whose text is cut over the ranks: each reads its slice of every row.

    S exchanges pairs (state, log decay), and with position="conv" the last tokens of a slice; A and
    I gather all keys and values, since torch's own context parallel has no form for CPUs. Padding
    is not taken, nor a cache.

    Args:
        model: the same on every rank. Its parameters get on each rank the gradient of that rank's
            slice alone: `sum_gradients` adds them up.
        group: the processes that share the text; None for all there are.
    """

    def __init__(self, model: CausalLM, group: dist.ProcessGroup | None = None):
        super().__init__()
        _place(group)
        self.model, self.group = model, group

    def forward(self, input_ids: Int[Tensor, "b l"]) -> Float[Tensor, "b l v"]:
        """Compute the logits of the token after each token of this rank's slice.

        Args:
            input_ids: this rank's slice of the rows, in [0, vocab_size); l may differ from rank to
                rank.
        """
        check.token_ids(self.model.config.vocab_size, input_ids=input_ids)
        rank, _ = _place(self.group)
        lengths = _lengths(input_ids, self.group)
        positions = sum(lengths[:rank]) + torch.arange(lengths[rank], device=input_ids.device)
        x = self.model.embedding(input_ids.long())
        with _exchanging(self.model, lengths, self.group):
            for block in self.model.blocks:
                x, _ = block(x, positions.expand(len(x), -1), use_cache=False)
        return self.model.logits(self.model.norm(x))


def sum_gradients(model: nn.Module, group: dist.ProcessGroup | None = None) -> None:
    """Add up the gradients of a model's parameters over the ranks, in place."""
    _place(group)
    for parameter in model.parameters():
        if parameter.requires_grad:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad, group=group)


@contextlib.contextmanager
def _exchanging(model, lengths, group):
    """Let the layers of a model reach the tokens of the ranks before, until the block is left."""
    rank, _ = _place(group)
    end = sum(lengths[: rank + 1])

    def scan(*arguments):
        return _cut_ssd(*arguments, group)

    def convolve(u, weight, **_):
        before = _tokens_before(u, weight.shape[1] - 1, lengths, group)
        return short_convolution(u, weight, history=before)

    def reads(layer):
        def read(q, cache):
            k, v, positions = (
                _all_tokens(t, lengths, group)[:, :end]
                for t in (cache.k, cache.v, cache.position_ids)
            )
            return type(layer)._read(layer, q, cache._replace(k=k, v=v, position_ids=positions))

        return read

    layers = [layer for layer in model.modules() if isinstance(layer, SSD | QCAttn)]
    try:
        for layer in layers:
            if isinstance(layer, SSD):
                layer._scan, layer._convolve = scan, convolve
            else:
                layer._read = reads(layer)
        yield
    finally:
        for layer in layers:
            if isinstance(layer, SSD):
                layer._scan, layer._convolve = _ssd, short_convolution
            else:
                del layer._read


def _lengths(t, group):
    """The number of tokens of every rank's slice."""
    lengths = torch.empty(_place(group)[1], dtype=torch.int64, device=t.device)
    dist.all_gather_single(lengths, lengths.new_tensor([t.shape[1]]), group=group)
    return lengths.tolist()


def _all_tokens(t, lengths, group):
    """The tokens (b, l, ...) of all ranks, of which this one holds some, one after the other."""
    pieces = _Gather.apply(_pad(t, max(lengths) - t.shape[1]), group)
    return torch.cat([piece[:, :n] for piece, n in zip(pieces, lengths, strict=True)], dim=1)


def _tokens_before(t, count, lengths, group):
    """The last `count` tokens of the ranks before this one, zeros where there are fewer."""
    rank, _ = _place(group)
    tails = [min(n, count) for n in lengths]
    before = _all_tokens(t[:, t.shape[1] - tails[rank] :], tails, group)[:, : sum(tails[:rank])]
    return F.pad(before, (0, 0, count, 0))[:, -count:] if count else before


class _Gather(torch.autograd.Function):
    """The tensors of all ranks, stacked; backward, the sum of what all ranks send to this one."""

    @staticmethod
    def forward(ctx, t, group):
        ctx.group = group
        gathered = t.new_empty(dist.get_world_size(group) * len(t), *t.shape[1:])
        dist.all_gather_single(gathered, t.contiguous(), group=group)
        return gathered.unflatten(0, (-1, len(t)))

    @staticmethod
    def backward(ctx, gradient):
        mine = torch.empty_like(gradient[0])
        dist.reduce_scatter_single(mine, gradient.flatten(0, 1).contiguous(), group=ctx.group)
        return mine, None


class _Shared(torch.autograd.Function):
    """A tensor that all ranks have: unchanged; backward, the sum of all ranks' gradients."""

    @staticmethod
    def forward(ctx, t, group):
        ctx.group = group
        return t.view_as(t)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.clone()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


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
