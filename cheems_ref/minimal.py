"""A whole Cheems in one file: the model, its training, its writing. Chapter 00 builds it.

    python cheems_ref/minimal.py    # trains on Python's manual for one to two minutes, then writes

Weights of `model.CausalLM` fit and give the same logits. This file leaves out the memory between
calls (each new byte means reading the text again), padding, all options, care with numbers (float64
sums, 16 bits, checks) and speed. b batch, l length, h heads, p head width, n state, r keys.
"""

import math
from functools import partial
from pydoc_data.topics import topics

import torch
import torch.nn.functional as F
from torch import einsum, nn

D_MODEL, N_HEADS, D_HEAD, D_STATE, D_FF, CHUNK = 128, 4, 32, 32, 256, 64
N_VALUES, K_VALUES, N_EXPERTS, K_EXPERTS, EXPERT_HEADS, D_QUERY = 16, 2, 256, 4, 2, 32
LENGTH, BATCH = 256, 8  # bytes in a window, windows in a step
Linear, Norm = partial(nn.Linear, bias=False), partial(nn.RMSNorm, D_MODEL, eps=1e-6)


def heads(x):  # (b, l, h p) -> (b, h, l, p)
    return x.unflatten(-1, (N_HEADS, -1)).transpose(1, 2)


def attention(q, k, v):
    """Give each token a mean of the values up to its own, weighted by q·k: (b, h, l, p)."""
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    future = torch.ones_like(scores[0, 0]).triu(1).bool()
    return scores.masked_fill(future, -torch.inf).softmax(-1) @ v


def ssd(x, dt, A, B, C):
    """y_t = h_t C_t with h_t = exp(dt_t A) h_{t-1} + dt_t x_t B_tᵀ, a chunk at a time."""
    state, y = 0, []  # the state is transposed: (n, p)
    chunks = (t.split(CHUNK, dim=2) for t in (dt[..., None] * x, dt * A, B[:, None], C[:, None]))
    for X, dA, B, C in zip(*chunks, strict=True):
        log_decay = dA.cumsum(-1)[..., None]  # since the chunk began
        M = (C @ B.mT) * (log_decay - log_decay.mT).tril().exp()
        y.append(M.tril() @ X + log_decay.exp() * (C @ state if y else 0))
        to_end = log_decay[:, :, -1:] - log_decay
        state = log_decay[:, :, -1:].exp() * state + B.mT @ (to_end.exp() * X)
    return torch.cat(y, dim=2)


def rotate(x):
    """Rotate pair i of the vector at position t by the angle t · 10000^(-2i/n): (..., l, n)."""
    half = x.shape[-1] // 2
    frequency = 10000.0 ** (-torch.arange(half).to(x) / half)
    angle = torch.arange(x.shape[-2]).to(x)[:, None] * frequency
    cos, sin, (first, second) = angle.cos(), angle.sin(), x.chunk(2, dim=-1)
    return torch.cat([cos * first - sin * second, sin * first + cos * second], dim=-1)


class SSD(nn.Module):
    """S: a state that fades, and that each token writes into and reads from."""

    def __init__(self):
        super().__init__()
        self.x_proj, self.out_proj = Linear(D_MODEL, D_MODEL), Linear(D_MODEL, D_MODEL)
        self.B_proj, self.C_proj = Linear(D_MODEL, D_STATE), Linear(D_MODEL, D_STATE)
        self.dt_proj = Linear(D_MODEL, N_HEADS)
        dt = torch.empty(N_HEADS).uniform_(math.log(1e-3), math.log(1e-1)).exp()
        self.dt_bias, self.D = nn.Parameter(dt.expm1().log()), nn.Parameter(torch.ones(N_HEADS))
        self.A_log = nn.Parameter(torch.empty(N_HEADS).uniform_(1, 16).log())

    def forward(self, u):
        x, B, C = heads(self.x_proj(u)), rotate(self.B_proj(u)), rotate(self.C_proj(u))
        dt = F.softplus(self.dt_proj(u) + self.dt_bias).mT  # (b, h, l)
        y = ssd(x, dt, -self.A_log.exp()[:, None], B, C) + self.D[:, None, None] * x
        return self.out_proj(y.transpose(1, 2).flatten(2))


class RetrievedValues(nn.Module):
    """x, times a mix of the rows of a table whose keys fit the token best."""

    def __init__(self):
        super().__init__()
        self.query_proj = Linear(D_MODEL, D_MODEL // 2)
        self.keys = nn.Parameter(torch.randn(N_HEADS, N_VALUES, D_HEAD // 2))
        self.values = nn.Parameter(torch.randn(N_HEADS, N_VALUES, D_HEAD))

    def forward(self, x):
        queries = heads(self.query_proj(x))
        scores = queries @ self.keys.mT / math.sqrt(queries.shape[-1])
        best, rows = scores.topk(K_VALUES)
        weights = torch.zeros_like(scores).scatter(-1, rows, best.softmax(-1))
        return heads(x) * (weights @ self.values)


class InnerFuncAttn(nn.Module):
    """I: attention whose queries and keys are rotated, and whose values are retrieved."""

    def __init__(self):
        super().__init__()
        self.q_proj, self.k_proj = Linear(D_MODEL, D_MODEL), Linear(D_MODEL, D_MODEL)
        self.inner, self.out_proj = RetrievedValues(), Linear(D_MODEL, D_MODEL)

    def forward(self, x):
        q, k = rotate(heads(self.q_proj(x))), rotate(heads(self.k_proj(x)))
        y = attention(q, k, self.inner(x))
        return self.out_proj(y.transpose(1, 2).flatten(2))


def best_pairs(queries, keys, k):
    """The k largest of r² sums q₁·θ₁ᵢ + q₂·θ₂ⱼ and their numbers i r + j; keys (h, 2, r, m)."""
    best, where = einsum("blhcm,hcrm->blhcr", queries, keys).topk(k)  # of each half c
    a, b = torch.tensor([(a, b) for a in range(k) for b in range(k // (a + 1))]).T  # a staircase
    scores, place = (best[..., 0, a] + best[..., 1, b]).topk(k)
    return scores, (where[..., 0, a] * keys.shape[2] + where[..., 1, b]).gather(-1, place)


class PEER(nn.Module):
    """Experts of one neuron, r² of them: each head of a token finds a few and sums them up."""

    def __init__(self):
        super().__init__()
        self.query_proj = Linear(D_MODEL, EXPERT_HEADS * D_QUERY)
        self.keys = nn.Parameter(torch.randn(EXPERT_HEADS, 2, math.isqrt(N_EXPERTS), D_QUERY // 2))
        self.down = nn.Parameter(torch.randn(N_EXPERTS, D_MODEL) / math.sqrt(D_MODEL))
        self.up = nn.Parameter(torch.randn(N_EXPERTS, D_MODEL) / (EXPERT_HEADS * K_EXPERTS) ** 0.5)

    def forward(self, x):
        queries = self.query_proj(x).unflatten(-1, (EXPERT_HEADS, 2, -1))
        scores, experts = best_pairs(queries, self.keys, K_EXPERTS)  # (b, l, h, k)
        fire = scores.softmax(-1) * F.silu(einsum("bld,blhkd->blhk", x, self.down[experts]))
        return einsum("blhk,blhkd->bld", fire, self.up[experts])


class CDMoE(nn.Module):
    """E: an MLP that all tokens share, plus the tiny experts, which read its output."""

    def __init__(self):
        super().__init__()
        maps = {"in_proj": Linear(D_MODEL, D_FF), "out_proj": Linear(D_FF, D_MODEL)}
        self.shared, self.experts = nn.ModuleDict(maps), PEER()

    def forward(self, x):
        x = self.shared["out_proj"](F.silu(self.shared["in_proj"](x)))
        return x + self.experts(x)


class Cheems(nn.Module):
    """An embedding, a layer per letter, each added to the stream, and the embedding once more."""

    def __init__(self, pattern):
        super().__init__()
        self.embedding = nn.Embedding(256, D_MODEL)
        nn.init.normal_(self.embedding.weight, std=0.02)
        layers = {"S": SSD, "I": InnerFuncAttn, "E": CDMoE}
        blocks = [nn.ModuleDict({"norm": Norm(), "layer": layers[x]()}) for x in pattern]
        self.blocks, self.norm = nn.ModuleList(blocks), Norm()

    def forward(self, ids):
        x = self.embedding(ids)
        for block in self.blocks:
            x = x + block["layer"](block["norm"](x))
        return self.norm(x) @ self.embedding.weight.T


def nats(model, windows):
    """The mean of -log p over all bytes but the first of each window."""
    return F.cross_entropy(model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())


def train(model, text, steps, peak=3e-3):
    """Train on random windows of a text; yields the loss of each step."""
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = peak * min(10 * (step + 1) / steps, 1 - step / steps)
        starts = torch.randint(len(text) - LENGTH, (BATCH, 1))
        loss = nats(model, text[starts + torch.arange(LENGTH + 1)])
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        yield loss.item()


def write(model, prompt, count, temperature=0.8):
    """Continue a prompt by `count` bytes, each drawn from softmax(logits / temperature)."""
    ids = torch.tensor([list(prompt.encode())])
    for _ in range(count):
        chances = (model(ids[:, -LENGTH:])[0, -1] / temperature).softmax(-1)
        ids = torch.cat([ids, torch.multinomial(chances, 1)[None]], dim=1)
    return bytes(ids[0].tolist()).decode(errors="replace")


if __name__ == "__main__":
    torch.manual_seed(0)
    text = torch.tensor(list("\n\n".join(topics[name] for name in sorted(topics)).encode()))
    text, held_out = text.tensor_split([len(text) * 9 // 10])
    model = Cheems("SESEIE")
    for step, loss in enumerate(train(model, text, 300), start=1):
        print(f"\rstep {step}: {loss:.2f} nats per byte", end="", flush=True)
    torch.set_grad_enabled(False)
    loss = nats(model, held_out.unfold(0, LENGTH + 1, LENGTH))  # counting pairs of bytes: 2.32
    print(f"\nheld-out text: {loss:.2f} nats per byte", write(model, "The ", 300), sep="\n")
