"""The wrapper for `transformers`: the package's own numbers, the library's conveniences."""

import copy
import dataclasses
import itertools
import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import transformers
import whole
from models import PADDING, built, ids, options, refused
from properties import gradients, normal
from safetensors import SafetensorError
from training import a_model, a_text, trained
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer
from transformers.generation.configuration_utils import ALL_STATIC_CACHE_IMPLEMENTATIONS

from cheems_lab import hub, training
from cheems_lab.checkpoint import CheckpointError
from cheems_ref import text
from cheems_ref.config import LAYERS, ModelConfig, from_saved
from cheems_ref.model import CausalLM, Sampling, generate
from cheems_ref.verify import check, must_differ

ROOT = Path(__file__).parents[1]
transformers.utils.logging.disable_progress_bar()
pytestmark = pytest.mark.usefixtures("unchecked")  # as users have it

# Every kind of cache, of mask, of head; alone and together.
STATES, ATTENTION = dict(pattern="SESE"), dict(pattern="AMAM", n_kv_heads=2)
GROUPS = dict(pattern="IEAE", inner="linear", n_kv_heads=2, mask="content")
CASES = ("SEIE", "SHSRAH", "SDICAX", "SKIK", "IRIG", ATTENTION, GROUPS)
FEW = ("SEIE", STATES, ATTENTION)
GREEDY = dict(do_sample=False, max_new_tokens=6)
TOLD = dict(return_dict_in_generate=True, **GREEDY)


def both(case, **changes):
    """A model of this package, and the same for the library."""
    net = built(whole, case, **changes)
    return net, hub.from_causal_lm(net)


def numbers(net):
    return {name: t.clone() for name, t in net.state_dict().items()}


def same(got, want):
    assert got.keys() == want.keys(), sorted(got.keys() ^ want.keys())
    for name, t in want.items():
        assert got[name].dtype == t.dtype and torch.equal(got[name], t), f"{name} differs"


def ordered(net, wrapped):
    """The parameters of a CausalLM in the order of its wrapper's."""
    mine = dict(net.named_parameters())
    return [mine[name.removeprefix("model.")] for name, _ in wrapped.named_parameters()]


# --- one pass ---------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES, ids=str)
def test_it_computes_what_the_package_computes(case):
    """Logits, hidden states and gradients; padded or not."""
    net, wrapped = both(case)
    tokens = ids(2, 7)
    for real in (None, PADDING["left"]):
        mask = None if real is None else real.long()
        want, _ = net(tokens, padding_mask=real)
        out = wrapped(tokens, attention_mask=mask, output_hidden_states=True)
        check("logits", out.logits, want)
        hidden = net.hidden_states(tokens, padding_mask=real)[0]
        check("hidden states", out.hidden_states[-1], hidden)
        assert len(out.hidden_states) == len(net.blocks) + 1
        got = gradients(out.logits, wrapped.parameters())
        check("gradients", got, gradients(want, ordered(net, wrapped)))
    check("ids in uint8", wrapped(tokens.to(torch.uint8)).logits, net(tokens)[0])
    embedded = wrapped(inputs_embeds=wrapped.get_input_embeddings()(tokens))
    check("embedded ids", embedded.logits, net(tokens)[0])


def test_it_takes_the_options_of_the_library():
    """logits_to_keep, labels, position_ids; an empty text."""
    net, wrapped = both("SEIE")
    tokens = ids(2, 7)
    want = wrapped(tokens).logits
    for kept, part in ((3, want[:, -3:]), (torch.tensor([0, 5]), want[:, [0, 5]])):
        check(f"logits_to_keep={kept}", wrapped(tokens, logits_to_keep=kept).logits, part)
    labels = tokens.clone()
    labels[0, 3] = -100
    out = wrapped(tokens, labels=labels)
    loss = F.cross_entropy(out.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    check("loss = mean of the next tokens'", out.loss.double(), loss, tol=1e-6)
    summed = wrapped(tokens, labels=labels, num_items_in_batch=4).loss
    check("loss over a larger batch", summed.double(), loss * 11 / 4, tol=1e-6)
    assert isinstance(wrapped(tokens, return_dict=False), tuple)
    at = torch.arange(7)[None]
    must_differ("stretched", wrapped(tokens, position_ids=3 * at).logits, want)
    cache = wrapped(ids(2, 0)).past_key_values
    got = wrapped(tokens, past_key_values=cache).logits
    check("after an empty text: logits", got, net(tokens)[0])


# --- several calls ----------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES, ids=str)
def test_calls_join_up(case):
    """A prompt, the rest and single tokens, through the library's cache, are one pass.

    A plain DynamicCache will do, too, where it can count the tokens.
    """
    net, wrapped = both(case)
    tokens, caches = ids(2, 7), [lambda config: None]
    caches += [DynamicCache] * (case in ("SEIE", ATTENTION))
    for make, real in itertools.product(caches, (None, PADDING["middle"])):
        seen = torch.ones(2, 7).bool() if real is None else real
        want, _ = net(tokens, padding_mask=real)
        parts, first = [], make(config=wrapped.config)
        cache = first
        for start, stop in itertools.pairwise((0, 3, 5, 6, 7)):
            mask = None if real is None else real[:, :stop].long()
            out = wrapped(tokens[:, start:stop], mask, past_key_values=cache)
            parts, cache = [*parts, out.logits.detach()], out.past_key_values
            assert cache.get_seq_length() == stop and first in (None, cache)
            assert isinstance(cache, DynamicCache)
        check("several calls = one", torch.cat(parts, 1)[seen], want[seen].detach())


def test_a_cache_is_copied_reset_reordered_and_only_read():
    """And cropped, but where it has states: these cannot take tokens back."""
    for case in FEW:
        _, wrapped = both(case)
        tokens, order = ids(3, 7), torch.tensor([2, 0, 0])
        with torch.no_grad():
            want = wrapped(tokens, use_cache=False).logits
            cache = wrapped(tokens[:, :5]).past_key_values
            assert not cache.is_compileable, "generate() makes masks of its own, and compiles"
            for _ in range(2):  # the second finds what the first has found
                read = wrapped(tokens[:, 5:], past_key_values=cache, use_cache=False)
                check(f"{case}: only read", read.logits, want[:, 5:])
                assert cache.get_seq_length() == 5 and read.past_key_values is None
            other = copy.deepcopy(cache)
            other.reorder_cache(order)
            got = wrapped(tokens[order, 5:], past_key_values=other).logits
            check(f"{case}: reordered", got, want[order, 5:])
            got = wrapped(tokens[:, 5:], past_key_values=cache).logits
            check(f"{case}: the one that was copied", got, want[:, 5:])
            if case == ATTENTION:
                cache.crop(-2)
                got = wrapped(tokens[:, 5:], past_key_values=cache).logits
                check("cropped", got, want[:, 5:])
            else:
                refused(ValueError, "cannot forget 2 tokens", cache.crop, -2)
                draft = dict(prompt_lookup_num_tokens=2, **GREEDY)
                refused(ValueError, "stateful", wrapped.generate, tokens[:1], **draft)
            cache.reset()
            assert cache.get_seq_length() == 0
            check(f"{case}: anew", wrapped(tokens, past_key_values=cache).logits, want)


# --- generate() -------------------------------------------------------------------------------


def test_it_writes_what_the_package_writes():
    """Greedily: the package's generate, with padding too; beams as without a cache."""
    for case, real in itertools.product(CASES, (None, PADDING["left"])):
        net, wrapped = both(case)
        mask = None if real is None else real.long()
        out = wrapped.generate(ids(2, 7), attention_mask=mask, output_logits=True, **TOLD)
        got = out.sequences[:, 7:]
        want = generate(net, ids(2, 7), 6, Sampling(temperature=0), padding_mask=real)
        assert torch.equal(got, want), f"{case}: {got.tolist()} for {want.tolist()}"
        seen = None if real is None else torch.cat([real, torch.ones(2, 6).bool()], 1)
        logits = net(out.sequences, padding_mask=seen)[0][:, 6:-1]
        # generate() keeps logits in float32
        check(f"{case}: logits", torch.stack(out.logits, 1).double(), logits, tol=1e-6)
        if case in FEW:
            beams = GREEDY | dict(attention_mask=mask, num_beams=4, num_return_sequences=2)
            got, want = (
                wrapped.generate(ids(2, 7), **beams, use_cache=cached) for cached in (True, False)
            )
            assert got.shape == (4, 13) and torch.equal(got, want), case


# --- training ---------------------------------------------------------------------------------


def test_checkpointing_changes_no_gradient():
    for case, reentrant in itertools.product(FEW, (False, True)):
        _, wrapped = both(case)
        wrapped.train()
        want, calls = gradients(wrapped(ids(2, 7)).logits, wrapped.parameters()), []
        wrapped.activation_checkpointing_enable(dict(use_reentrant=reentrant))
        wrapped.model.blocks[0].layer.register_forward_pre_hook(
            lambda *_, calls=calls: calls.append(1)
        )
        out = wrapped(ids(2, 7))
        assert out.past_key_values is None
        (out.logits * normal(*out.logits.shape, seed=8)).sum().backward()
        assert len(calls) == 2, "no layer is computed again"
        got = torch.cat([p.grad.flatten() for p in wrapped.parameters()])
        check(f"{case}, checkpointing: gradients", got, want)


# --- files ------------------------------------------------------------------------------------


def test_it_is_loaded_as_it_was_saved(tmp_path):
    """In one file or in many, to the last bit; it computes the same, up to rounding.

    A weight that was read is a view of the file at any multiple of 8 bytes, a weight that was made
    starts at a multiple of 64, and the order in which a matrix product adds depends on that.
    """
    for i, case in enumerate(CASES):
        net, wrapped = both(case)
        for size in ("1GB", "2KB"):
            folder = tmp_path / f"{i} {size}"
            wrapped.save_pretrained(folder, max_shard_size=size)
            assert (len([*folder.glob("*.safetensors")]) > 1) == (size == "2KB")
            again = hub.CheemsForCausalLM.from_pretrained(folder)
            same(numbers(again), numbers(wrapped))
            check(f"{case}, loaded: logits", again(ids(2, 7)).logits, net(ids(2, 7))[0])
        assert again.config.to_model_config() == net.config == ModelConfig(**options(case))
        assert again.config.num_hidden_layers == len(again.config.layer_types)
        narrow = hub.CheemsForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
        for name, p in narrow.named_parameters():
            wide = name.endswith(("A_log", "dt_bias"))
            assert p.dtype == (torch.float32 if wide else torch.bfloat16), name
        assert narrow(ids(2, 7)).logits.dtype == torch.bfloat16
    same(numbers(hub.CheemsModel.from_pretrained(folder)), numbers(wrapped.model))


START = dict(vocab_size=256, d_model=64, n_heads=8, d_state=16, d_ff=64, n_neurons=256)
START |= dict(inner="ssd", position="conv", tie_embeddings=False)


def test_a_model_made_on_the_meta_device_starts_as_any_other():
    for case in ("SIP", "SKE", "AMR"):
        c = ModelConfig(**dict(pattern=case) | START)
        torch.manual_seed(1)
        want = numbers(hub.from_causal_lm(CausalLM(c)))
        config = hub.CheemsConfig.from_model_config(c)
        torch.utils.deterministic.fill_uninitialized_memory = True  # with NaN
        torch.use_deterministic_algorithms(True)
        try:
            late = hub.CheemsForCausalLM.from_pretrained(None, config=config, state_dict={})
        finally:
            torch.use_deterministic_algorithms(False)
        for name, t in numbers(late).items():
            start = want[name]
            assert t.isfinite().all(), f"{name} was not started"
            assert torch.equal(t, start) == (start.std() == 0), f"{name} is not drawn"
            if t.numel() > 500:
                assert abs(t.std() / start.std() - 1) < 0.1, name
            if name.endswith(("A_log", "dt_bias")):  # of SSD: 8 heads, uniform in an interval
                low, high = (0, math.log(16)) if name.endswith("A_log") else (-7, -2.2)
                assert low <= t.min() and t.max() <= high, name
        assert late.lm_head.weight is not late.model.embedding.weight


def trained_run(folder, **changes):
    return trained(training, folder, model=a_model(**changes), ids=a_text())


def test_what_is_not_whole_is_refused(tmp_path):
    """Without weights, with half of them, with those of another model, by a newer version."""
    both("SEIE")[1].save_pretrained(tmp_path / "whole")
    config = json.loads((tmp_path / "whole/config.json").read_text())

    def load(name, *, weights=lambda data: data, **changes):
        shutil.copytree(tmp_path / "whole", tmp_path / name)
        path = tmp_path / name / "model.safetensors"
        data = weights(path.read_bytes())
        path.unlink() if data is None else path.write_bytes(data)
        (tmp_path / name / "config.json").write_text(json.dumps(config | changes))
        return hub.CheemsForCausalLM.from_pretrained(tmp_path / name)

    refused(OSError, "no file named model.safetensors", load, "none", weights=lambda data: None)
    refused(SafetensorError, "not fully covered", load, "half", weights=lambda data: data[:-40])
    refused(RuntimeError, "ignore_mismatched_sizes", load, "wider", d_ff=24)
    refused(ValueError, "position must be one of .*'spin'", load, "newer", position="spin")
    for name in ("nowhere", "whole"):
        refused(CheckpointError, f"no checkpoint at .*{name}", hub.from_run, tmp_path / name)
    trained_run(tmp_path / "small")
    to = tmp_path / "new"
    refused(ValueError, "16 ids, and a text 256 bytes", hub.export, tmp_path / "small", to)
    assert not to.exists()


def test_a_configuration_takes_the_library_s_names():
    assert hub.CheemsConfig().to_model_config() == ModelConfig()
    short = hub.CheemsConfig(pattern="SM × 2 + A", hidden_size=32, tie_word_embeddings=False)
    assert short.to_model_config() == ModelConfig("SMSMA", d_model=32, tie_embeddings=False)
    kinds = ["linear_attention", "moe", "linear_attention", "moe", "full_attention"]
    assert short.layer_types == kinds
    assert hub.CheemsConfig(pattern="IE", inner="ssd").layer_types == ["hybrid", "moe"]
    assert hub.CheemsConfig(num_key_value_heads=2).to_model_config().n_kv_heads == 2


def test_ids_are_bytes(tmp_path):
    tokenizer = hub.byte_tokenizer()
    assert len(tokenizer) == 256
    for words in ("", " déjà vu 🐕\n\tΔ  Ā ", "\x00\x7f", "n't  <|endoftext|> ."):
        found = tokenizer(words)
        assert found.input_ids == text.text_to_ids(words).tolist() == [*words.encode()]
        assert tokenizer.decode(found.input_ids) == words
    padded = tokenizer(["a", "déjà"], padding=True)
    assert padded.attention_mask == [[0] * 5 + [1], [1] * 6]
    assert tokenizer.batch_decode(padded.input_ids, skip_special_tokens=True) == ["a", "déjà"]
    tokenizer.save_pretrained(tmp_path)
    again = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert again("Δ").input_ids == [*"Δ".encode()]


# --- what is exported -------------------------------------------------------------------------

ELSEWHERE = """
import sys
import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer, pipeline

folder, copy = sys.argv[1:]
assert "cheems_ref" not in sys.modules
for auto in (AutoConfig, AutoModel):
    auto.from_pretrained(folder, trust_remote_code=True)
net = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
prompt = tokenizer("Ch", return_tensors="pt")
writes = pipeline("text-generation", folder, trust_remote_code=True)
(told,) = writes("Ch", max_new_tokens=4, do_sample=False)
torch.save([net(prompt.input_ids).logits, net.generate(**prompt, max_new_tokens=4)], copy)
assert told["generated_text"] == tokenizer.decode(torch.load(copy)[1][0])
net.save_pretrained(folder)  # again, by the library alone
again = AutoModelForCausalLM.from_pretrained(folder)
for name, p in net.named_parameters():
    assert torch.equal(again.get_parameter(name), p), name
torch.testing.assert_close(again(prompt.input_ids).logits, net(prompt.input_ids).logits)
"""


@pytest.mark.program
def test_what_is_exported_is_loaded_elsewhere(tmp_path):
    """In a process of its own, without the network, with trust_remote_code=True."""
    run = trained_run(tmp_path / "run", vocab_size=256, tie_embeddings=False)
    folder = hub.export(tmp_path / "run", tmp_path / "exported")
    card = (folder / "README.md").read_text()
    n = sum(p.numel() for p in run.model.parameters())
    for line in (f"{n:,}, in float32", "pattern: `AM`"):
        assert line in card and "{" not in card, f"the card lacks {line!r}"
    environment = dict(HF_HUB_OFFLINE="1", HF_HOME=str(tmp_path / "home"), OMP_NUM_THREADS="1")
    command = [sys.executable, "-c", ELSEWHERE, folder, tmp_path / "found.pt"]
    how = dict(cwd=ROOT, env=os.environ | environment, capture_output=True, text=True)
    finished = subprocess.run(command, **how)
    assert finished.returncode == 0, finished.stderr
    logits, written = torch.load(tmp_path / "found.pt")
    prompt = text.text_to_ids("Ch")[None]
    check("elsewhere: logits", logits, run.model(prompt)[0])
    want = generate(run.model, prompt, 4, Sampling(temperature=0))
    assert torch.equal(written[:, 2:], want)


# --- bad input --------------------------------------------------------------------------------

# fmt: off
BAD_CALLS = [
    (dict(inputs_embeds=torch.zeros(2, 5, 16)), "input_ids or inputs_embeds, and not both"),
    (dict(input_ids=None), "input_ids or inputs_embeds, and not both"),
    (dict(input_ids=torch.tensor([[3, 19]])), r"in \[0, 19\) .*entries in \[3, 19\]"),
    (dict(attention_mask=torch.ones(2, 4)), r"attention_mask must be .*\(2, 5\), .*\(2, 4\)"),
    (dict(position_ids=torch.arange(4)[None]), r"position_ids .*\(1, 4\)"),
]
# fmt: on


def test_bad_input_is_refused():
    wrapped = both("SEIE")[1]
    for arguments, message in BAD_CALLS:
        refused(ValueError, message, wrapped, **dict(input_ids=ids(2, 5)) | arguments)
    refused(ValueError, "needs 21 positions.*max_positions = 20", both("IDSP")[1], ids(2, 21))
    refused(TypeError, "n_heads must be a whole number", hub.CheemsConfig, n_heads="4")


# --- caches of other kinds --------------------------------------------------------------------


def kinds_of_cache(kind=transformers.Cache):
    """Every class of cache that transformers has, and no class of our own."""
    found = {kind} if kind.__module__.startswith("transformers.") else set()
    return found.union(*map(kinds_of_cache, kind.__subclasses__()))


def caches(config):
    """Caches that a user could make, of every class, by how they are written."""
    made = {
        "DynamicCache()": DynamicCache(),
        "DynamicCache(config)": DynamicCache(config=config),
        "DynamicCache(offloading)": DynamicCache(offloading=True),
        "StaticCache": transformers.StaticCache(config=config, max_cache_len=9),
        "EncoderDecoderCache": transformers.EncoderDecoderCache(DynamicCache(), DynamicCache()),
        "Cache": transformers.Cache(layer_class_to_replicate=DynamicLayer),
    }
    for kind in kinds_of_cache() - {type(cache) for cache in made.values()}:
        made[kind.__name__] = kind.__new__(kind)  # some need libraries that are not here
        transformers.Cache.__init__(made[kind.__name__], layer_class_to_replicate=DynamicLayer)
    return made


TAKEN_CACHES = {"DynamicCache()", "DynamicCache(config)"}
WITH_AND_WITHOUT = [dict(pattern=p) for p in ("A", "AM", "MA", "SM", "MS", "SEIE")]
WITH_AND_WITHOUT += [dict(pattern="MI", inner="ssd"), dict(pattern="MSA", position="conv")]


@pytest.mark.parametrize("case", WITH_AND_WITHOUT, ids=lambda case: case["pattern"])
def test_a_cache_of_any_kind_is_right_or_refused_by_its_name(case):
    net, wrapped = both(case)
    tokens = ids(2, 7)
    with torch.no_grad():
        want = net(tokens)[0]
        for name, cache in caches(wrapped.config).items():
            if name not in TAKEN_CACHES:
                called = dict(input_ids=tokens[:, :3], past_key_values=cache)
                refused(ValueError, type(cache).__name__, wrapped, **called)
                continue
            parts = [
                wrapped(tokens[:, start:stop], past_key_values=cache).logits
                for start, stop in itertools.pairwise((0, 3, 5, 6, 7))
            ]
            check(f"{name}, handed on by the caller", torch.cat(parts, 1), want)
            assert cache.get_seq_length() == 7


@pytest.mark.parametrize("case", WITH_AND_WITHOUT[1:4], ids=lambda case: case["pattern"])
def test_generate_refuses_other_caches_by_their_name(case):
    net, wrapped = both(case)
    want = generate(net, ids(2, 7), 6, Sampling(temperature=0))
    for name in (*ALL_STATIC_CACHE_IMPLEMENTATIONS, "offloaded", "quantized"):
        asked = GREEDY | dict(cache_implementation=name)
        if name == "hybrid" and wrapped.generate(ids(2, 7), **asked)[:, 7:].equal(want):
            continue  # transformers takes this old name for none
        refused(ValueError, name, wrapped.generate, ids(2, 7), **asked)
    for cache in (None, DynamicCache(), DynamicCache(config=wrapped.config)):
        got = wrapped.generate(ids(2, 7), past_key_values=cache, **GREEDY)
        assert torch.equal(got[:, 7:], want)
    static = transformers.StaticCache(config=wrapped.config, max_cache_len=20)
    refused(
        ValueError, "StaticCache", wrapped.generate, ids(2, 7), past_key_values=static, **GREEDY
    )


def test_a_cache_of_another_model_is_refused():
    (_, long), (_, short) = both(dict(pattern="SEIE")), both(dict(pattern="SE"))
    cache = short(ids(2, 5)).past_key_values
    called = dict(input_ids=ids(2, 1), past_key_values=cache)
    refused(ValueError, "past_key_values is of another model", long, **called)


# --- names of other configurations ---------------------------------------------------------------

SAME = dict(hidden_size="d_model", num_attention_heads="n_heads", intermediate_size="d_ff")
SAME |= dict(num_key_value_heads="n_kv_heads", rope_theta="rope_base", rms_norm_eps="norm_eps")
OTHERS = """num_hidden_layers layer_types n_layer n_embd n_head n_inner head_dim num_experts
num_local_experts num_experts_per_tok state_size conv_kernel layer_norm_eps layer_norm_epsilon
max_position_embeddings n_positions rope_scaling rope_parameters top_k hidden_act attention_bias
mlp_bias attention_dropout sliding_window"""


def test_no_field_bears_the_name_of_an_option_of_generate():
    fields = {field.name for field in dataclasses.fields(ModelConfig)}
    assert not fields & vars(transformers.GenerationConfig()).keys()
    wrapped = both("IPAM")[1]  # with a content mask that keeps three keys
    draws = wrapped.generate(ids(1, 3).expand(64, -1), do_sample=True, max_new_tokens=1)
    assert len(draws[:, -1].unique()) > 3, "the mask's keys limit what is sampled"
    wrapped.generation_config.max_new_tokens = 5
    wrapped.generation_config.validate(strict=True)


def test_common_names_are_aliases_or_refused_with_the_name_to_use():
    for name, field in SAME.items():
        value = 1e-4 if field == "norm_eps" else 8 if field == "d_model" else 4
        config = hub.CheemsConfig(**{"n_heads": 4, "d_model": 8, name: value})
        assert getattr(config.to_model_config(), field) == value, name
        assert getattr(config, name) == value
    for name in OTHERS.split():
        refused(ValueError, name, hub.CheemsConfig, **{name: 3})


def test_a_configuration_saved_under_the_old_name_is_read_or_refused(tmp_path):
    config = both("SEIE")[1].config.to_dict()
    config.pop("k_keys")
    (tmp_path / "config.json").write_text(json.dumps(config | dict(top_k=None), default=str))
    assert hub.CheemsConfig.from_pretrained(tmp_path).k_keys is None
    (tmp_path / "config.json").write_text(
        json.dumps(config | dict(top_k=3, mask="content"), default=str)
    )
    refused(ValueError, "k_keys", hub.CheemsConfig.from_pretrained, tmp_path)
    old = dict(pattern="SI", mask="content", top_k=3)
    assert from_saved(old) == ModelConfig(pattern="SI", mask="content", k_keys=3)


# --- offloaded weights ------------------------------------------------------------------------


@pytest.mark.parametrize("letter", [*LAYERS])
def test_offloaded_weights_are_fetched(letter, tmp_path):
    """From memory, by a model of the package and by the wrapper; from the disk, by the wrapper."""
    accelerate = pytest.importorskip("accelerate")
    for tied in (True, False):
        case = dict(pattern="S" + letter, tie_embeddings=tied)
        net, wrapped = both(case, dtype=torch.float32)
        with torch.no_grad():
            want = net(ids(2, 7))[0]
            wrapped.save_pretrained(tmp_path / str(tied))
            accelerate.cpu_offload(net, torch.device("cpu"))
            check(f"{letter}, offloaded: logits", net(ids(2, 7))[0], want)
            accelerate.cpu_offload(wrapped, torch.device("cpu"))
            check(f"{letter}, the wrapper offloaded: logits", wrapped(ids(2, 7)).logits, want)
            parts = ("lm_head", "model.embedding", "model.norm", "model.blocks.0")
            places = dict.fromkeys(parts, "cpu") | {"model.blocks.1": "disk"}
            again = hub.CheemsForCausalLM.from_pretrained(
                tmp_path / str(tied), device_map=places, offload_folder=tmp_path / "offloaded"
            )
            check(f"{letter}, on the disk: logits", again(ids(2, 7)).logits, want)
