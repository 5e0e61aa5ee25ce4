"""Text from a model: choose an id, append it, repeat.

`sample` chooses from logits, `stream` yields each new id, `generate` returns them all; `Sampling`
says how ids are chosen. A model here is a `cheems_ref.model.CausalLM`, or has its `check`,
`_hidden_states` (which looks at no value) and `logits`. Notebook 07 writes with it.
Wrong shapes, sizes or values raise ValueError naming argument and numbers (check.py).
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from cheems_ref import check


@dataclass(frozen=True)
class Sampling:
    """How the next id is chosen.

    Args:
        temperature: ≥ 0; logits are divided by it, and 0 is greedy: the first of the largest.
        top_k: keep the k most probable ids; None for all.
        top_p: of those, keep the smallest set of most probable ids whose probabilities sum to at
            least p, in (0, 1]; None for all.
        generator: source of randomness; None for torch's own.

    Source: Holtzman et al. (2020) for top_p.
    """

    temperature: float | int = 1.0
    top_k: int | None = None
    top_p: float | int | None = None
    generator: torch.Generator | None = None

    def __post_init__(self):
        check.numbers("[0, inf)", temperature=self.temperature)
        check.sizes(top_k=self.top_k)
        if self.top_p is not None:
            check.numbers("(0, 1]", top_p=self.top_p)


DEFAULT = Sampling()


def sample(logits: Float[Tensor, "b v"], sampling: Sampling = DEFAULT) -> Int[Tensor, " b"]:
    """Choose the next id of every row."""
    check.shapes(logits=(logits, "b v"))
    if sampling.temperature == 0:
        return logits.argmax(dim=-1)
    wide = torch.promote_types(logits.dtype, torch.float32)
    # Only differences of logits count. With the largest at 0 no temperature makes them overflow.
    ordered, ids = logits.to(wide).sort(dim=-1, descending=True, stable=True)
    ordered = (ordered - ordered[:, :1]) / max(sampling.temperature, torch.finfo(wide).tiny)
    ordered = ordered.softmax(dim=-1)
    if sampling.top_k is not None:
        rank = torch.arange(ordered.shape[1], device=ids.device)
        ordered = ordered.masked_fill(rank >= sampling.top_k, 0)
        ordered = ordered / ordered.sum(-1, keepdim=True)
    if sampling.top_p is not None and sampling.top_p < 1:
        before = ordered.cumsum(-1) - ordered
        ordered = ordered.masked_fill(before >= sampling.top_p, 0)
    place = torch.multinomial(ordered, 1, generator=sampling.generator)
    return ids.gather(1, place)[:, 0]


def stream(
    model: nn.Module,
    prompt: Int[Tensor, "b l"],
    max_new_tokens: int,
    sampling: Sampling = DEFAULT,
    *,
    padding_mask: Bool[Tensor, "b l"] | None = None,
    eos_id: int | None = None,
) -> Iterator[Int[Tensor, " b"]]:
    """Continue a prompt, yielding each new id (b,) as soon as it is chosen.

    What is wrong is refused at the call, before anything is yielded.

    Args:
        model: in any dtype, on any device.
        prompt: at least one real token in every row.
        max_new_tokens: ≥ 0.
        sampling: how each id is chosen.
        padding_mask: True for real tokens: prompts of different lengths, padded on either side;
            None for all.
        eos_id: a row that has written it goes on writing it, and when all have, writing ends.
    """
    if max_new_tokens < 0:
        raise ValueError(f"max_new_tokens must be at least 0, got {max_new_tokens}")
    model.check(prompt, padding_mask, max_new_tokens=max_new_tokens)
    if prompt.shape[1] == 0 or (padding_mask is not None and not padding_mask.any(dim=1).all()):
        raise ValueError("every row of the prompt needs at least one real token to go on from")
    return _stream(model, prompt, max_new_tokens, sampling, padding_mask, eos_id)


def _stream(model, prompt, max_new_tokens, sampling, padding_mask, eos_id):
    """`stream` of what is right."""
    if padding_mask is None:
        last = torch.full(prompt.shape[:1], prompt.shape[1] - 1, device=prompt.device)
    else:
        last = (torch.arange(prompt.shape[1], device=prompt.device) * padding_mask).argmax(dim=1)
    done = torch.zeros(len(prompt), dtype=torch.bool, device=prompt.device)
    rows = torch.arange(len(prompt), device=prompt.device)
    tokens, cache = prompt, None
    for _ in range(max_new_tokens):
        with torch.inference_mode():
            x, cache = model._hidden_states(tokens, padding_mask, cache)
            ids = sample(model.logits(x[rows, last]), sampling)
            if eos_id is not None:
                ids = ids.masked_fill(done, eos_id)
                done = done | (ids == eos_id)
        yield ids.clone()  # which, outside of inference mode, autograd may use
        if eos_id is not None and bool(done.all()):
            return
        tokens, padding_mask, last = ids[:, None], None, torch.zeros_like(last)


def generate(
    model: nn.Module,
    prompt: Int[Tensor, "b l"],
    max_new_tokens: int,
    sampling: Sampling = DEFAULT,
    *,
    padding_mask: Bool[Tensor, "b l"] | None = None,
    eos_id: int | None = None,
) -> Int[Tensor, "b new"]:
    """Continue a prompt and return the new ids without it; arguments as for `stream`."""
    steps = stream(
        model, prompt, max_new_tokens, sampling, padding_mask=padding_mask, eos_id=eos_id
    )
    new = list(steps)
    return torch.stack(new, dim=1) if new else prompt.new_zeros(len(prompt), 0, dtype=torch.int64)
