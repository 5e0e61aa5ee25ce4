"""Bytes of cache and parameters, computed from a config and found in the model."""

import itertools
from functools import partial

import pytest
import torch
from models import (
    MODELS,
    PADDING,
    STATE_MIXERS,
    ask,
    built,
    held,
    ids,
    is_caught,
    mistakes,
    normal,
    options,
    title,
    titled,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import cheems_ref.model as model
from cheems_ref import budget, config, experts, presets, retrieval

# --- the cache: properties of a module m and of a case ----------------------------------------


def cache_takes_the_bytes_that_are_computed(m, case):
    """All together, part by part, and in every dtype; states of sixteen-bit models are float32."""
    for dtype, (b, context) in itertools.product(
        (torch.float64, torch.float32, torch.bfloat16), ((2, 7), (1, 1), (3, 0))
    ):
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
    for name in ("mamba2-320m", "mamba2-tiny"):
        config = m.preset(name)
        assert m.cache_bytes(config, 0) == m.cache_bytes(config, 10**6), name
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


class NothingLarge(TorchDispatchMode):
    """Refuses every tensor of more than a hundred entries that is somewhere."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in tree_leaves(out):
            if torch.is_tensor(t) and t.numel() > 100:
                assert t.is_meta, f"{func} makes {tuple(t.shape)} in memory"
        return out


def sizes_are_computed_without_the_model(m):
    with NothingLarge():
        for case in MODELS:
            config = m.ModelConfig(**options(case))
            m.count_parameters(config)
            m.cache_bytes(config, 1000)


@pytest.mark.parametrize("letter", "PKE")
def test_more_heads_than_neurons_leave_none_idle(letter):
    options = dict(pattern="S" + letter, n_neurons=9, n_retrieval_heads=2)
    for k, some_idle in ((4, True), (5, False), (9, False)):
        count = model.count_parameters(model.ModelConfig(**options, k_neurons=k))[letter]
        assert (count.active < count.total) == some_idle


def the_random_state_is_left_alone(m):
    """Making a config, counting its parameters or its cache draws no number."""
    before = torch.random.get_rng_state()
    for case in MODELS:
        config = m.ModelConfig(**options(case))
        m.count_parameters(config)
        m.cache_bytes(config, 100)
    assert torch.equal(torch.random.get_rng_state(), before), "torch's random state has moved"


size = partial(model.cache_bytes, model.ModelConfig(), context=10)
BAD_SIZES = [
    (dict(context=-1), r"context must be a number in \[0, inf\), got -1"),
    (dict(batch=-2), r"batch must be a number in \[0, inf\), got -2"),
    (dict(dtype=torch.int64), "dtype must be floating-point, got torch.int64"),
]


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("arguments, message", BAD_SIZES)
def test_a_bad_size_is_refused_with_its_name_and_number(arguments, message):
    with pytest.raises(ValueError, match=message):
        size(**arguments)


# --- the package has them ---------------------------------------------------------------------

OF_THE_MODULE = (
    the_random_state_is_left_alone,
    sizes_are_computed_without_the_model,
    states_do_not_grow,
    cache_is_that_of_the_lecture,
)
HELD = titled(
    *((has_property, None) for has_property in OF_THE_MODULE),
    *itertools.product((cache_takes_the_bytes_that_are_computed, parameters_are_counted), MODELS),
    *((active_are_those_that_a_token_reaches, letter) for letter in STATE_MIXERS),
)


@pytest.mark.parametrize("has_property, case", HELD.values(), ids=HELD)
def test_the_model_has_the_property(has_property, case):
    ask(has_property, case)


# --- negative controls ------------------------------------------------------------------------

IN_CONFIG = 'with torch.device("meta"):\n                    LAYERS'
IN_COUNT = 'with torch.device("meta"):\n            layer'
IDLE = "n * (total - idle)"
FIRST = "set(self.experts[: self.k].parameters())"
OTHERS = "set(self.experts[self.k :].parameters())"
VALUES = 'value = key if c.inner == "linear" else c.d_model'

# fmt: off
PLANTED = [
    (the_random_state_is_left_alone, None, {
        "count makes layers": [(IN_COUNT, IN_COUNT.replace("meta", "cpu"))]}),
    (sizes_are_computed_without_the_model, None, {
        "count makes layers": [(IN_COUNT, IN_COUNT.replace("meta", "cpu"))]}),
    *((cache_takes_the_bytes_that_are_computed, case, {what: [edit]}) for case, what, edit in (
        ("SHSRAH", "keys without values", ('n["A"] * 2 * key', 'n["A"] * key')),
        ("SHSRAH", "a key per head", ("(c.n_kv_heads or c.n_heads) * head", "c.n_heads * head")),
        ("SHSRAH", "keys of one row", ("keys_values=batch * context", "keys_values=context")),
        ("SHSRAH", "every layer has keys", ('n["A"] * 2 * key', "len(c.pattern) * 2 * key")),
        ("SHSRAH", "width of the model", (" if c.d_head is None else c.n_heads * c.d_head", "")),
        ("SHSRAH", "all taps", ("(c.d_conv - 1)", "c.d_conv")),
        ("SHSRAH", "B and C once", ("2 * c.n_groups", "c.n_groups")),
        ("SHSRAH", "B and C of one group", ("2 * c.n_groups * c.d_state if", "2 * c.d_state if")),
        ("SHSRAH", "x alone is mixed", ("inner + 2 * c.n_groups * c.d_state if", "inner if")),
        ("SHSRAH", "convolution of one layer", ('n["S"] * (c.d_conv', "(c.d_conv")),
        ("SHSRAH", "positions of four bytes", ("batch * 8 *", "batch * 4 *")),
        ("SHSRAH", "the next position left out", ("(1 + context *", "(context *")),
        ("SHSRAH", "positions of S", ('(n["A"] + n["I"]))', '(n["A"] + n["S"]))')),
        ("SKIK", "convolutions everywhere", ('if c.position == "conv" else 0', 'if True else 0')),
        ("SKIK", "states of sixteen bits", ("batch * state * c.d_state * wide",
                                            "batch * state * c.d_state * size")),
        ("SKIK", "states of one row", ("states=batch * state", "states=state")),
        ("SKIK", "inner states left out", ('(n["I"] * c.d_model if c.inner == "ssd" else 0)', "0")),
        ("SEIE", "inner states everywhere", ('if c.inner == "ssd" else 0', 'if True else 0')),
        ("SGIM", "values per head", (VALUES, "value = c.d_model")),
        ("IPAM", "values per group", (VALUES, "value = key")))),
    (states_do_not_grow, None, {
        "a state per token": [("states=batch * state", "states=batch * context * state")]}),
    (cache_is_that_of_the_lecture, None, {
        "a head for every query": [("(c.n_kv_heads or c.n_heads) * head", "c.n_heads * head")],
        "keys without values": [('n["A"] * 2 * key', 'n["A"] * key')],
        "always four bytes": [("size, wide = config, dtype.itemsize,", "size, wide = config, 4,")],
        "width of S for I": [
            ("c.d_model // c.n_heads\n", "(c.d_head or c.d_model // c.n_heads)\n")]}),
    (parameters_are_counted, "SHSRAH", {
        "no last norm": [("(len(c.pattern) + 1) * c.d_model", "len(c.pattern) * c.d_model")],
        "every head is a matrix": [("0 if c.tie_embeddings else table", "table")],
        "every letter once": [("Parameters(n * total, n *", "Parameters(total, n *")],
        "head left out of the active": [("else table, table)", "else table, 0)")],
        "the embedding is active": [("Parameters(table, 0)", "Parameters(table, table)")]}),
    (active_are_those_that_a_token_reaches, "R", {
        "all are active": [(IDLE, "n * total")],
        "idle ones of one layer": [(IDLE, "n * total - idle")]}),
    (active_are_those_that_a_token_reaches, "K", {
        "idle ones not asked for": [('if hasattr(layer, "idle_parameters")', "if False")]}),
]
PLANTED_EXPERTS = [
    *((active_are_those_that_a_token_reaches, letter, {what: edits}) for letter, what, *edits in (
        ("R", "k of them idle", (OTHERS, FIRST)),
        ("C", "a shared matrix for each", (f"{OTHERS} - active", OTHERS)),
        ("X", "gates left out", (" + gates\n", "\n")),
        ("H", "what is shared is idle", (OTHERS, f"({OTHERS} | set(self.shared.parameters()))")))),
]
PLANTED_RETRIEVAL = [
    *((active_are_those_that_a_token_reaches, letter, {what: [edit]}) for letter, what, edit in (
        ("P", "neurons of one head", ("n_experts - self.n_heads * self.k", "n_experts - self.k")),
        ("P", "up left out", ("(self.down.shape[1] + self.up.shape[1])", "self.down.shape[1]")),
        ("K", "gate left out", ("in (self.gate, self.down, self.up)", "in (self.down, self.up)")),
        ("K", "all are active", ("return self.retrieval.idle_rows() * width", "return 0")),
        ("E", "all are active", ("return self.experts.idle_parameters()", "return 0")))),
]
PLANTED_CONFIG = [
    (the_random_state_is_left_alone, None, {
        "config makes layers": [(IN_CONFIG, IN_CONFIG.replace("meta", "cpu"))]}),
    (sizes_are_computed_without_the_model, None, {
        "config makes layers": [(IN_CONFIG, IN_CONFIG.replace("meta", "cpu"))]}),
]
PLANTED_MODEL = [
    (cache_takes_the_bytes_that_are_computed, "IPAM", {
        "a part not counted": [("for part in cache)", "for part in cache[:2])")]}),
]
PLANTED_PRESETS = [
    (cache_is_that_of_the_lecture, None, {
        "two attention layers in eight": [
            ("(SG SR SG SR AG SR SG SR) × 4", "(SG SR AG SR AG SR SG SR) × 4")]}),
]
# fmt: on


MISTAKES = mistakes(
    (experts, PLANTED_EXPERTS),
    (retrieval, PLANTED_RETRIEVAL),
    (budget, PLANTED),
    (config, PLANTED_CONFIG),
    (model, PLANTED_MODEL),
    (presets, PLANTED_PRESETS),
)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("room, has_property, case, edits", MISTAKES.values(), ids=MISTAKES)
def test_planted_mistake_is_caught(room, has_property, case, edits):
    is_caught(room, has_property, case, edits)


def test_every_mistake_breaks_a_property_that_the_model_has():
    """So that it was the mistake that was caught."""
    assert {title(*row[1:3]) for row in MISTAKES.values()} <= HELD.keys()
