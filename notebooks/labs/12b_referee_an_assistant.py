# %% [markdown]
# # 12b · Referee an assistant
#
# **You asked a coding assistant for five layers. All five run, all have the right shapes, and all
# train. Three are wrong. Which?** By the end you will be able to
#
# - read a layer for the mistakes that people and models really make;
# - find a fault with six questions, without a second implementation;
# - say what these questions can't see.
#
# You need chapter 12, section 3.
#
# Sources: the code below was written for this lab, with mistakes that published code has had. Code:
# `cheems_ref/verify.py`.

# %% tags=["setup"]
import contextlib
import io

import torch
from torch import nn
from torch.nn import functional as F

from cheems_ref.rope import apply_rope, rope_cos_sin
from cheems_ref.verify import (
    check,
    every_parameter_learns,
    is_causal,
    must_differ,
    padding_changes_nothing,
    pieces_equal_one_pass,
    rows_are_independent,
    shift_changes_nothing,
)

torch.set_num_threads(1)
torch.set_default_dtype(torch.float64)


# %% tags=["setup"]
def turned(x, positions):
    """Rotate x (b, l, d), as one head, to positions (l,) or (b, l)."""
    cos, sin = rope_cos_sin(positions.expand(x.shape[:2]), x.shape[2], dtype=x.dtype)
    return apply_rope(x[:, :, None], cos, sin)[:, :, 0]


# %% [markdown]
# ## 1 · Read
#
# Give each layer two minutes. Width $d$ = 8, x is (b, l, d), and a mask is True for a real token.
# The first is attention with rotary positions and a cache of keys and values:


# %%
class CachedAttention(nn.Module):
    """Causal attention of one head, with rotary positions."""

    def __init__(self, d):
        super().__init__()
        self.project, self.out, self.scale = nn.Linear(d, 3 * d), nn.Linear(d, d), d**-0.5

    def forward(self, x, position_ids, padding_mask=None, cache=None):
        q, k, v = self.project(x).chunk(3, dim=-1)
        positions = torch.arange(x.shape[1])
        q, k = turned(q, positions), turned(k, positions)
        real = torch.ones(x.shape[:2], dtype=torch.bool) if padding_mask is None else padding_mask
        if cache is not None:
            k, v, real = (torch.cat(pair, 1) for pair in zip(cache, (k, v, real), strict=True))
        back = torch.ones(x.shape[1], k.shape[1], dtype=torch.bool).tril(k.shape[1] - x.shape[1])
        scores = (q @ k.mT) * self.scale
        scores = scores.masked_fill(~(back & real[:, None]), -1e30)
        return self.out(scores.softmax(-1) @ v), (k, v, real)


# %% [markdown]
# The second is a memory that forgets, computed in chunks. Where is its causal mask, and does it
# also hold between chunks?


# %%
class ChunkedMemory(nn.Module):
    """A state that forgets by a gate, in chunks."""

    def __init__(self, d, chunk_size=8):
        super().__init__()
        self.project, self.gate, self.chunk_size = nn.Linear(d, 3 * d), nn.Linear(d, 1), chunk_size

    def forward(self, x):
        length = x.shape[1]
        x = F.pad(x, (0, 0, 0, -length % self.chunk_size)).unflatten(1, (-1, self.chunk_size))
        q, k, v = self.project(x).chunk(3, dim=-1)  # (b, chunks, tokens, d)
        kept = F.logsigmoid(self.gate(x)).cumsum(2)  # log of what is kept since the chunk began
        y = ((kept - kept.mT).tril().exp().tril() * (q @ k.mT)) @ v
        left = (k * (kept[:, :, -1:] - kept).exp()).mT @ v  # what each chunk leaves behind
        state, outputs = torch.zeros_like(left[:, 0]), []
        for i in range(x.shape[1]):
            outputs.append(y[:, i] + kept[:, i].exp() * (q[:, i] @ state))
            state = kept[:, i, -1:].exp() * state + left[:, i]
        return torch.cat(outputs, 1)[:, :length]


# %% [markdown]
# The third routes each token to two of four experts:


# %%
class Router(nn.Module):
    """k of n linear experts for each token."""

    def __init__(self, d, n_experts=4, k=2):
        super().__init__()
        self.scores, self.k = nn.Linear(d, n_experts), k
        self.experts = nn.ModuleList(nn.Linear(d, d) for _ in range(n_experts))

    def forward(self, x):
        tokens = x.flatten(0, 1)
        gates, chosen = self.scores(tokens).softmax(0).topk(self.k, dim=-1)
        y = torch.zeros_like(tokens)
        for i, expert in enumerate(self.experts):
            token, place = (chosen == i).nonzero(as_tuple=True)
            y = y.index_add(0, token, gates[token, place, None] * expert(tokens[token]))
        return y.view_as(x)


# %% [markdown]
# The fourth is a short convolution. Its cache holds the last three inputs:


# %%
class ShortConvolution(nn.Module):
    """Each channel of a token is a weighted sum of its last four."""

    def __init__(self, d, width=4):
        super().__init__()
        self.kernel = nn.Parameter(torch.randn(width, d))

    def forward(self, x, padding_mask=None, cache=None):
        if padding_mask is not None:
            x = x * padding_mask[..., None]
        before = x.new_zeros(len(x), len(self.kernel) - 1, x.shape[2]) if cache is None else cache
        seen = torch.cat([before, x], 1)
        y = sum(row * seen[:, i : i + x.shape[1]] for i, row in enumerate(self.kernel))
        return y, seen[:, -(len(self.kernel) - 1) :]


# %% [markdown]
# And the fifth is the memory once more, token by token, with a state as its cache:


# %%
class GatedMemory(nn.Module):
    """A state that forgets by a gate, token by token."""

    def __init__(self, d):
        super().__init__()
        self.project, self.gate = nn.Linear(d, 3 * d), nn.Linear(d, 1)

    def forward(self, x, padding_mask=None, cache=None):
        q, k, v = self.project(x).chunk(3, dim=-1)
        keep = torch.sigmoid(self.gate(x))[..., None]
        state = x.new_zeros(len(x), x.shape[2], x.shape[2]) if cache is None else cache
        outputs = []
        for t in range(x.shape[1]):
            state = keep[:, t] * state + k[:, t, :, None] * v[:, t, None, :]
            outputs.append((q[:, t, None] @ state)[:, 0])
        y = torch.stack(outputs, 1)
        return (y if padding_mask is None else y * padding_mask[..., None]), state


# %% tags=["setup"]
def made(kind, d=8):
    """A layer of this kind with random weights, the same at each call."""
    _ = torch.manual_seed(0)
    return kind(d)


KINDS = (CachedAttention, ChunkedMemory, Router, ShortConvolution, GatedMemory)
LAYERS = {kind.__name__: made(kind) for kind in KINDS}

# %% [markdown]
# ## 2 · Ask
#
# **Predict.** Here is a review that lets everything through. Change it to yours, and add the line
# that you'd object to, such as "wrong: softmax(0)":

# %%
predicted = dict.fromkeys(LAYERS, "right")
print(", ".join(f"{name}: {verdict}" for name, verdict in predicted.items()))

# %% [markdown]
# **Fill in 1.** Put the six questions to a layer. A question is called with the layer and a width,
# such as `is_causal(layer, 8)`. It raises an `AssertionError` if the answer is no, and a
# `ValueError` or `TypeError` if it doesn't apply, for instance because there is no cache.

# %% tags=["setup"]
QUESTIONS = {
    "causal": is_causal,
    "rows": rows_are_independent,
    "pieces": pieces_equal_one_pass,
    "padding": padding_changes_nothing,
    "shift": shift_changes_nothing,
    "learns": every_parameter_learns,
}


# %% tags=["exercise"]
def referee(layer):
    """By question: "yes", "no", or "–" where it doesn't apply."""
    ### BEGIN SOLUTION
    answers = {}
    for name, ask in QUESTIONS.items():
        try:
            with contextlib.redirect_stdout(io.StringIO()):  # without the lines they print
                ask(layer, 8)
            answers[name] = "yes"
        except AssertionError:
            answers[name] = "no"
        except (ValueError, TypeError):
            answers[name] = "–"
    return answers
    ### END SOLUTION


# %% tags=["check"]
from cheems_ref.exercises import not_none


class Peeks(nn.Linear):
    """A layer of ours that reads the next token, takes positions, and ignores them."""

    def forward(self, x, position_ids):
        return super().forward(x).roll(-1, dims=1)


got = not_none(referee(made(lambda d: Peeks(d, d))))
got = {name: {"-": "–"}.get(answer, answer) for name, answer in got.items()}
assert list(got) == list(QUESTIONS), f"one answer per question, in their order; got {list(got)}"
assert got["causal"] == "no", f"a layer that reads the next token isn't causal, got {got['causal']}"
assert [got[name] for name in ("rows", "learns")] == ["yes", "yes"], f"a linear layer: {got}"
assert [got[name] for name in ("pieces", "padding", "shift")] == 3 * ["–"], f"don't apply: {got}"
print("your referee tells yes, no and – apart")

# %% [markdown]
# Now the five. Compare each row with your prediction:

# %%
answers = {name: referee(layer) for name, layer in LAYERS.items()}
print(f"{'':18}", *(f"{name:>8}" for name in QUESTIONS))
for name, row in answers.items():
    print(f"{name:18}", *(f"{answer:>8}" for answer in row.values()))
wrong = {name for name, row in answers.items() if "no" in row.values()}
said = {name for name, verdict in predicted.items() if verdict.lower().startswith("wrong")}
hits = sum((name in wrong) == (name in said) for name in LAYERS)
print(f"predicted: {hits} of {len(LAYERS)}")

# %% tags=["guard"]
failed = {name: [q for q, answer in row.items() if answer == "no"] for name, row in answers.items()}
assert failed["CachedAttention"] == ["pieces"] and failed["GatedMemory"] == ["padding"]
assert failed["Router"] == ["causal", "rows", "learns"]
assert answers["CachedAttention"]["shift"] == "–"
assert wrong == {"CachedAttention", "Router", "GatedMemory"}
try:
    _ = every_parameter_learns(LAYERS["Router"], 8)
except AssertionError as error:
    assert str(error).endswith("a gradient of zero for scores.bias")

x = torch.randn(2, 21, 8, generator=torch.Generator().manual_seed(1))  # the right two are right
steps = made(GatedMemory)
_ = steps.load_state_dict(LAYERS["ChunkedMemory"].state_dict())
check("ChunkedMemory = token by token", LAYERS["ChunkedMemory"](x), steps(x)[0])
kernel = LAYERS["ShortConvolution"].kernel
y = F.conv1d(F.pad(x.mT, (3, 0)), kernel.T[:, None], groups=8).mT
check("ShortConvolution = conv1d", LAYERS["ShortConvolution"](x)[0], y)

# %% [markdown]
# - **CachedAttention** is right in one pass, so it trains. In pieces each call counts its positions
#   from 0 again, and generation goes wrong. Look at the dash under *shift*, too: the layer takes
#   `position_ids` and doesn't use them. A dash that you didn't expect is a finding.
# - **Router** takes the softmax over the tokens, not over the experts (`softmax(0)`). A gate then
#   depends on other texts and on later tokens. The last question names a second trace of the same
#   mistake: `scores.bias` gets no gradient, since a number added to all tokens cancels.
# - **GatedMemory** hides the outputs of padded positions, after it has written them into the state.
#   On the right nobody notices. On the left, every real token reads them.
#
# **Fill in 2.** A maintainer wants an example of three lines, not our package. Return the output
# for x alone, and for x behind three tokens of padding, which must be the same.


# %% tags=["exercise"]
def alone_and_padded(layer, x):
    """Of a layer with a mask: the output for x (b, l, d), and the one with padding on the left."""
    ### BEGIN SOLUTION
    padded = torch.cat([torch.ones_like(x[:, :1]).expand(-1, 3, -1), x], 1)
    mask = torch.arange(padded.shape[1]).expand(padded.shape[:2]) >= 3
    return layer(x)[0], layer(padded, padding_mask=mask)[0][:, 3:]
    ### END SOLUTION


# %% tags=["check"]
from cheems_ref.exercises import not_none

x = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(1))
watched, masks = made(ShortConvolution), []
watched.register_forward_pre_hook(
    lambda _, args, named: masks.append(named.get("padding_mask", (*args, None)[1])),
    with_kwargs=True,
)
alone, padded = not_none(alone_and_padded(watched, x))
check("your example: a right layer passes", padded, alone)
hidden = [int((~mask.bool()).sum()) for mask in masks if mask is not None]
assert 6 in hidden, "the layer should get a padding_mask that hides three tokens of each text"
alone, padded = alone_and_padded(made(GatedMemory), x)
check("the first output is for x alone", alone, made(GatedMemory)(x)[0])
assert not torch.allclose(padded, alone), "GatedMemory passes: is your padding on the left?"
_ = must_differ("your example: GatedMemory", padded, alone)


# %% [markdown]
# ## 3 · Mend
#
# **Fill in 3.** Mend the attention: write its `forward` anew, and let it use the `position_ids`
# that it's given. The check puts all six questions, so counting on from the length of the cache
# isn't enough: *shift* must apply. It also compares one pass with the layer above, which was
# right.


# %% tags=["exercise"]
def mended_forward(self, x, position_ids, padding_mask=None, cache=None):
    """What CachedAttention.forward should be: attention at the positions that it is given."""
    ### BEGIN SOLUTION
    q, k, v = self.project(x).chunk(3, dim=-1)
    q, k = turned(q, position_ids), turned(k, position_ids)
    real = torch.ones(x.shape[:2], dtype=torch.bool) if padding_mask is None else padding_mask
    if cache is not None:
        k, v, real = (torch.cat(pair, 1) for pair in zip(cache, (k, v, real), strict=True))
    back = torch.ones(x.shape[1], k.shape[1], dtype=torch.bool).tril(k.shape[1] - x.shape[1])
    scores = (q @ k.mT) * self.scale
    scores = scores.masked_fill(~(back & real[:, None]), -1e30)
    return self.out(scores.softmax(-1) @ v), (k, v, real)
    ### END SOLUTION


# %% tags=["check"]
class MendedAttention(CachedAttention):
    """CachedAttention with the forward that you wrote."""

    forward = mended_forward


mended = made(MendedAttention)
for ask in QUESTIONS.values():
    _ = ask(mended, 8)
x = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(1))
ids = torch.arange(5).expand(2, 5)
check("one pass is as before", mended(x, ids)[0], made(CachedAttention)(x, ids)[0])
mended(x, ids, padding_mask=ids >= 2)[0][:, 2:].sum().backward()
finite = all(weights.grad.isfinite().all() for weights in mended.parameters())
assert finite, "NaN in the gradient: what does a row without a real key read? (lab 05a)"

# %% [markdown]
# ## 4 · What the questions can't see
#
# The six questions ask for laws that any layer should obey. They don't know what your layer was
# meant to be. Suppose the assistant forgets the factor $1/\sqrt d$ in the attention. Before you run
# it: which question notices?

# %%
mended, unscaled = made(MendedAttention), made(MendedAttention)
unscaled.scale = 1.0
print(", ".join(f"{name} {answer}" for name, answer in referee(unscaled).items()))
x = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(1))
ids = torch.arange(5).expand(2, 5)
_ = must_differ("against the definition: no scale", unscaled(x, ids)[0], mended(x, ids)[0])

# %% tags=["guard"]
assert set(referee(unscaled).values()) == {"yes"}

# %% [markdown]
# None does. A wrong formula can obey every law, and only a comparison with a definition finds it.
#
# There are two more gaps. Did you object to `-1e30`? In this attention a padded query reads all
# keys alike, the future included. In one layer nobody notices, since no real token reads a padded
# one. Put another layer behind it that does, and the future leaks (lab 05a). And none of the six
# questions continues from a cache of padded rows. Pad a prompt on the *right* and give it to
# `ShortConvolution`. Which three inputs will its cache hold?
#
# ## Summary
#
# - A layer can have the right shapes, train, and be wrong.
# - Ask for laws first: they need no second implementation, and they name the fault.
# - A dash is also an answer. Ask why the question doesn't apply.
# - Then compare with a definition. Laws can't tell which formula you wanted.

# %% tags=["versions", "nbval-ignore-output"]
print("PyTorch version", torch.__version__.partition("+")[0])
