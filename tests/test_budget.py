"""Bytes of cache and parameters, computed from a config and found in the model."""

import itertools
import logging
import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
import whole as model
from models import PADDING, ask, built, ids, options, properties_in, refused, titled
from properties import held, normal
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

import cheems_ref.budget
import cheems_ref.retrieval
import cheems_ref.roofline
from cheems_ref.retrieval import naive_retrieved_experts as written_out

# --- the cache: properties of a module m and of a case ----------------------------------------


def cache_takes_the_bytes_that_are_computed(m, case):
    """All together, part by part, and in every dtype; states of sixteen-bit models are float32."""
    for dtype, b, context in ((torch.float64, 3, 0), (torch.float32, 1, 1), (torch.bfloat16, 2, 7)):
        net = built(m, case, dtype)
        _, cache = net(ids(b, context))
        want = m.cache_bytes(net.config, context, batch=b, dtype=dtype)
        parts = dict.fromkeys(want._fields, 0)
        kinds = dict(k="keys_values", v="keys_values", state="states", conv="convolutions")
        for name, t in held(cache).items():
            kind = kinds.get(name.split(".")[-1], "positions")
            parts[kind] += t.numel() * t.element_size()
            wide = torch.promote_types(dtype, torch.float32)
            assert t.dtype == dict(states=wide, positions=torch.int64).get(kind, dtype), name
        assert parts == want._asdict(), f"{case}, {dtype}, {b} × {context}"
        assert cache.nbytes() == want.total() == sum(parts.values())


def states_do_not_grow(m):
    """What a model of S alone remembers does not depend on how much it has read."""
    config = m.preset("mamba2-320m")
    assert m.cache_bytes(config, 0) == m.cache_bytes(config, 10**6)
    assert m.cache_bytes(config, 0).keys_values == 0
    config = m.preset("cheems-tiny")
    one, two = (m.cache_bytes(config, n) for n in (100, 200))
    assert two.keys_values == 2 * one.keys_values and two.states == one.states


def cache_is_that_of_the_lecture(m):
    """L22: 128, 32, 32 and 4 GiB of keys and values at 262,144 tokens of sixteen bits."""
    table = {"llama-2-7b": 128, "mistral-7b": 32, "mixtral-8x7b": 32, "jamba-52b": 4}
    for name, size in table.items():
        got = m.cache_bytes(m.preset(name), 262_144)
        assert got.keys_values == size * 2**30, f"{name}: {got.keys_values / 2**30} GiB"
        half = m.cache_bytes(m.preset(name), 262_144, batch=3, dtype=torch.float32)
        assert half.keys_values == 2 * 3 * size * 2**30
    assert m.cache_bytes(m.preset("jamba-52b"), 262_144).states == 28 * 8192 * 16 * 4


def test_padding_is_remembered_in_one_byte_per_token():
    net, real = built(model, "IEAE"), PADDING["middle"]
    _, cache = net(ids(2, 7), padding_mask=real)
    want = model.cache_bytes(net.config, 7, batch=2, dtype=torch.float64).total()
    assert cache.nbytes() == want + 2 * real.numel()


# --- counting parameters: properties of a module m --------------------------------------------


def parameters_are_counted(m, case):
    """By part, tied and untied."""
    for tied in (True, False):
        net = built(m, case, tie_embeddings=tied)
        sizes = {name: p.numel() for name, p in net.named_parameters()}
        counts = m.count_parameters(net.config)
        want = {
            "embedding": sizes["embedding.weight"],
            "head": sizes.get("lm_head.weight", 0),
            "norms": sum(n for name, n in sizes.items() if "norm." in name),
        }
        for i, block in enumerate(net.blocks):
            at = f"blocks.{i}.layer."
            mine = sum(n for name, n in sizes.items() if name.startswith(at))
            want[block.letter] = want.get(block.letter, 0) + mine
        assert {name: part.total for name, part in counts.items()} == want, case
        assert sum(want.values()) == sum(sizes.values())
        table = sizes["embedding.weight"]
        assert (counts["embedding"].active, counts["head"].active) == (0, table)


def active_are_those_that_a_token_reaches(m, letter):
    """Those with a gradient after one token.

    Queries and keys all count: every key is compared with. (Where the k of a head share a half, the
    gradient of its query cancels in the softmax.)
    """
    case = dict(pattern=f"S{letter}{letter}", n_neurons=1024, n_experts=5, tie_embeddings=False)
    net = built(m, case)
    y, _ = net(ids(1, 1))
    (y * normal(*y.shape, seed=8)).sum().backward()
    active = 0
    for i in (1, 2):
        for name, p in net.blocks[i].layer.named_parameters():
            reached = 0 if p.grad is None else int((p.grad != 0).sum())
            compares = name.endswith(("keys", "query_proj.weight"))
            active += p.numel() if compares else reached
    counts = m.count_parameters(net.config)
    assert counts[letter].active == active, f"{counts[letter]}, but {active} have a gradient"
    assert counts["S"].active == counts["S"].total
    assert counts["norms"].active == counts["norms"].total == 4 * 16
    if letter in "RHCXPKE":
        assert active < counts[letter].total
    else:
        assert active == counts[letter].total


def training_takes_what_is_computed(m):
    """A model, gradients and optimiser after an update; the logits and their gradient."""
    for case, dtype in (("SHSRAH", torch.float32), ("IPAM", torch.float64)):
        net = built(m, case, dtype)
        optimizer = torch.optim.AdamW(net.parameters())
        logits, _ = net(ids(2, 7))
        logits.retain_grad()
        logits.square().sum().backward()
        optimizer.step()
        held = [t for state in optimizer.state.values() for t in state.values() if t.ndim]
        held += [t for p in net.parameters() for t in (p, p.grad)]
        want = sum(t.nbytes for t in (*held, logits, logits.grad))
        got = budget(m).training_bytes(net.config, tokens=14, dtype=dtype)
        assert got == want, f"{case}: {got} bytes, {want} are held"
    llama = budget(m).training_bytes(m.preset("llama-2-7b"))
    assert f"{llama / 1e9:.0f}" == "108", "GB for training Llama 2 7B"


def a_process_holds_its_part_and_what_is_read(m):
    """Of a model over four; whole what is outside of its blocks, and the largest block."""
    for case in ("SHSRAH", "IPAM"):
        net = built(m, case, torch.float32)
        n = sum(p.numel() for p in net.parameters())
        blocks = [sum(p.numel() for p in block.parameters()) for block in net.blocks]
        shared = {id(p) for block in net.blocks for p in block.parameters()}
        rest = sum(p.numel() for p in net.parameters() if id(p) not in shared)
        want = math.ceil(4 * n / 4) + 2 * (rest + max(blocks))
        got = budget(m).training_bytes(net.config, processes=4)
        assert got == 4 * want, f"{case}: {got // 4} numbers instead of {want}"
        logits = 2 * math.ceil(15 / 4) * net.config.vocab_size
        assert budget(m).training_bytes(net.config, tokens=15, processes=4) == 4 * (want + logits)


def operations_are_those_that_torch_counts(m, case):
    """With S in chunks, and all t · s pairs in place of the allowed ones."""
    for b, length, context in ((2, 19, 0), (1, 1, 5), (2, 9, 5)):
        net = built(m, case, backend="chunked")
        text, cache = ids(b, context + length), None
        if context:
            _, cache = net(text[:, :context])
        with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
            net(text[:, context:], cache=cache)
        want = 0
        counts = budget(m).count_flops(net.config, length, context=context, batch=b)
        pairs, allowed = length * (context + length), length * context + sum(range(length + 1))
        for count in counts.values():
            want += count.matrices + count.pairs * pairs / allowed
        assert counter.get_total_flops() == want, f"{case}: {b} × {length} after {context}"


def activations_are_what_autograd_keeps(m, case):
    """But for a few bytes of P, K and E: in sixteen bits, on fake tensors alone, an `embedding_bag`
    keeps an index for every row that it takes.
    """
    for dtype, b, length in (
        (torch.float32, 2, 12),
        (torch.float64, 1, 7),
        (torch.bfloat16, 2, 12),
    ):
        net, text, kept = built(m, case, dtype), ids(b, length), {}

        def keep(t, kept=kept):
            kept[t.untyped_storage().data_ptr()] = t.untyped_storage()
            return t

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
            logits, _ = net(text, use_cache=False)
            wide = torch.promote_types(dtype, torch.float32)
            F.cross_entropy(logits.flatten(0, 1).to(wide), text.flatten())
        for p in net.parameters():
            kept.pop(p.untyped_storage().data_ptr(), None)
        held = sum(storage.nbytes() for storage in kept.values())
        counts = budget(m).activation_bytes(net.config, length, batch=b, dtype=dtype)
        assert [*counts] == [*dict.fromkeys(net.config.pattern), "head"]
        off = abs(sum(counts.values()) - held)
        c = net.config
        bags, rows = sum(map(c.pattern.count, "PKE")), c.n_retrieval_heads * c.k_neurons
        most = bags * (32 + (8 * b * length * rows if dtype == torch.bfloat16 else 0))
        assert off <= most, f"{case}, {dtype}: {off} of {held}"


def a_step_moves_parameters_and_cache(m, case):
    """The cache that is there, what of the next one is new, and every parameter at work, once."""
    for b in (1, 3):
        net = built(m, case, torch.float32)
        text = ids(b, 6)
        _, cache = net(text[:, :5])
        _, after = net(text[:, 5:], cache=cache)
        written = sum(
            t.nbytes - (held(cache)[name].nbytes if name.endswith((".k", ".v")) else 0)
            for name, t in held(after).items()
            if t.dtype != torch.int64
        )
        read = sum(part.active for part in m.count_parameters(net.config).values())
        got = budget(m).step_bytes(net.config, 5, batch=b, dtype=torch.float32)
        assert got == 4 * read + cache.nbytes() + written, f"{case}, {b} rows"


def rows_are_those_of_the_formula(m):
    """What P, K and E do with rows of their tables, in the written-out form, which torch counts."""
    net = built(m, dict(pattern="SPPKE"))
    counts = budget(m).count_flops(net.config, 3, batch=2)
    for letter, times in (("P", 2), ("K", 1), ("E", 1)):
        layer = net.blocks["SPPKE".index(letter)].layer
        x = normal(2, 3, net.config.d_model, seed=3)
        table = layer.experts if letter == "E" else layer
        seen = layer.private(x) if letter == "K" else x
        gates, indices = (layer.retrieval if letter == "K" else table).route(seen)
        gate = layer.gate if letter == "K" else None
        with FlopCounterMode(display=False) as counter:
            written_out(seen, table.down, table.up, gates, indices, gate=gate)
        assert counts[letter].rows == times * counter.get_total_flops(), letter


def budget(of):
    """The room of budgets below a module: a planted one, or the package's own."""
    return getattr(of, "copied", {}).get("budget", cheems_ref.budget)


class NothingLarge(TorchDispatchMode):
    """Refuses every tensor of more than a hundred entries that is somewhere."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in tree_leaves(out):
            if torch.is_tensor(t) and t.numel() > 100:
                real = not (t.is_meta or isinstance(t, FakeTensor))
                assert not real, f"{func} makes {tuple(t.shape)} in memory"
        return out


def sizes_are_computed_without_the_model(m):
    """No tensor is made in memory, and no random number is drawn."""
    before = torch.random.get_rng_state()
    with NothingLarge():
        for case in ("SHSRAH", "SKIK"):
            config = m.ModelConfig(**options(case))
            m.count_parameters(config)
            m.cache_bytes(config, 1000)
            budget(m).training_bytes(config, tokens=1000)
            budget(m).count_flops(config, 1000, context=1000)
            budget(m).activation_bytes(config, 19)
            budget(m).step_bytes(config, 1000)
    assert torch.equal(torch.random.get_rng_state(), before), "torch's random state has moved"


def test_more_heads_than_neurons_leave_none_idle():
    options = dict(n_neurons=9, n_retrieval_heads=2)
    for letter, (k, some_idle) in itertools.product("PKE", ((4, True), (5, False))):
        config = model.ModelConfig("S" + letter, **options, k_neurons=k)
        count = model.count_parameters(config)[letter]
        assert (count.active < count.total) == some_idle


def d_ff_is_fitted(m, case):
    """The nearest number of parameters: one more or less of d_ff is no nearer."""
    config = m.ModelConfig(**options(case))
    total = [
        sum(part.total for part in m.count_parameters(replace(config, d_ff=f)).values())
        for f in (29, 30, 31)
    ]
    if total[0] == total[1]:
        refused(ValueError, "no layer of the pattern .* has a d_ff", budget(m).fit_d_ff, config, 99)
        return
    step = total[1] - total[0]
    for wanted in (total[1], total[1] + step // 2 - 1, total[1] - step // 2 + 1):
        fitted = budget(m).fit_d_ff(config, wanted)
        assert fitted == replace(config, d_ff=30), f"{case}: {fitted.d_ff}"
    refused(ValueError, "parameters must be at least", budget(m).fit_d_ff, config, 7)


@pytest.mark.usefixtures("unchecked")
def test_a_pass_of_nothing_is_refused():
    room, config = cheems_ref.budget, model.ModelConfig()
    for function, size in itertools.product(
        (room.count_flops, room.activation_bytes), (dict(length=0), dict(length=1, batch=0))
    ):
        refused(ValueError, "(length|batch) must be at least 1, got 0", function, config, **size)


# --- texts as long as one likes ---------------------------------------------------------------

SMALL = dict(d_model=16, n_heads=2, d_state=4, d_ff=8, n_neurons=16, d_query=8, k_neurons=2)
SMALL |= dict(vocab_size=50, chunk_size=4)  # so that a block of chunks has 64 tokens
LOOPS = [  # every layer that loops over its text, and the masks that grow with its square
    dict(pattern="S", position="conv", d_head=4),
    dict(pattern="I", inner="ssd", n_kv_heads=1),
    dict(pattern="I", inner="ssd", mask="content", k_keys=70),
    dict(pattern="SPKE"),
]


@pytest.mark.parametrize("case", LOOPS, ids=str)
def test_a_long_text_has_the_numbers_of_counting_every_block(case, monkeypatch):
    room = cheems_ref.budget
    config = model.ModelConfig(**SMALL | case)
    for scores in (room, cheems_ref.retrieval):
        monkeypatch.setattr(scores, "SCORES_PER_BLOCK", 2**8)  # 16 tokens of product keys

    def counted():
        for n, b, dtype in ((64 * 7, 1, torch.float32), (64 * 8 + 37, 2, torch.bfloat16)):
            yield room.activation_bytes(config, n, batch=b, dtype=dtype)
        for n, context in ((64 * 6 + 1, 64 * 7 + 5), (1, 64 * 7)):
            yield room.count_flops(config, n, context=context, batch=3)

    continued = [*counted()]
    monkeypatch.setattr(room, "BLOCKS", 10**9)  # none of these texts is long then
    assert continued == [*counted()]


def test_the_work_of_counting_does_not_grow_with_the_text(monkeypatch):
    """In tensors that are made to count: as many for a million tokens as for a million million."""
    config, made = model.ModelConfig("SPIKE", **SMALL, inner="ssd"), []
    real = cheems_ref.budget._fake_layer

    def watched(part, config, shape, dtype, *, context=0):
        made.append((part, shape, context))
        return real(part, config, shape, dtype, context=context)

    for room in (cheems_ref.budget, cheems_ref.roofline):
        monkeypatch.setattr(room, "_fake_layer", watched)
    for n in (10**6, 10**12):
        cheems_ref.budget.activation_bytes(config, n)
        cheems_ref.budget.count_flops(config, n)
        cheems_ref.budget.count_flops(config, 1, context=n)
    long = [one for one in made if one[0] in "SI" and max(*one[1], one[2]) > 64 * 5]
    long += [one for one in made if one[0] in "PKE" and max(one[1]) > 5 * 2**24 // 16]
    assert made and not long


class Kept(logging.Handler):
    """Keeps what is logged."""

    def __init__(self):
        super().__init__()
        self.records = []

    def emit(self, record):
        self.records.append(record)


@pytest.mark.usefixtures("unchecked")
def test_a_tensor_that_64_bits_cannot_count_is_refused_without_a_traceback():
    """Of torch's, which logs one before the error leaves."""
    room, masked = cheems_ref.budget, model.ModelConfig("I", mask="content")
    log, kept = logging.getLogger("torch._subclasses.fake_tensor"), Kept()
    log.addHandler(kept)
    try:
        for message, count, config, n, more in (
            (
                "length = 10{16}: a tensor",
                room.activation_bytes,
                model.ModelConfig("MA"),
                10**16,
                {},
            ),
            ("length = 10{12}: a tensor", room.activation_bytes, masked, 10**12, {}),
            ("context = 9{30}, ", room.count_flops, masked, 1, dict(context=10**30 - 1)),
        ):
            refused(ValueError, f"{message}.* bytes", count, config, n, **more)
    finally:
        log.removeHandler(kept)
    assert not kept.records


# --- the package has them ---------------------------------------------------------------------

CASES = ("SEIE", "SHSRAH", "SDICAX", "SKIK", "IPAM", "SGIM")  # every letter, cache and mask
HELD = properties_in(globals(), CASES) | titled(
    *((active_are_those_that_a_token_reaches, letter) for letter in "GRHCXPKE")
)


@pytest.mark.parametrize("has_property, case", HELD.values(), ids=HELD)
def test_the_model_has_the_property(has_property, case):
    ask(has_property, case)
