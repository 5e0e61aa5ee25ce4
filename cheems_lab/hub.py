"""Cheems models in Hugging Face's `transformers`: its Auto classes, generate(), Trainer and files.

    CheemsConfig            ModelConfig as a configuration of transformers, for config.json
    CheemsModel             embedding, blocks and last norm
    CheemsForCausalLM       CheemsModel and logits: the model for generate() and Trainer
    StateCache              transformers' DynamicCache for models with states
    from_causal_lm          wraps a model of this package
    from_run                wraps the model of a training run
    byte_tokenizer          a tokenizer whose ids are the bytes
    export                  writes a folder that AutoModelForCausalLM loads

No layer is implemented here: the blocks are `cheems_ref.model.Block`, and so are their initial
weights. Importing this module registers the classes with AutoConfig, AutoModel and
AutoModelForCausalLM under the name "cheems_ref".

The model makes its own cache, or takes one of `make_cache` or an empty `DynamicCache()`. It refuses
every other kind of cache by its name: a static cache, for example, holds keys of tokens that are
still to come. A cache is written in place, one layer for each letter of the pattern, by the names
in `CheemsConfig.layer_types`. It holds keys and values as (b, g, s, p), the tokens of the
convolution as (b, channels, d_conv - 1), and states as they are, (b, h, p, n).

    letter                  name in transformers    SSDCache, AttentionCache
    S                       linear_attention        state, conv
    A, I                    full_attention          k, v
    I with inner="ssd"      hybrid                  k, v, inner.state
    all others              moe                     nothing

Wrong configurations, ids, masks, positions and caches raise ValueError naming argument and numbers.
Source: transformers 5.23, `cache_utils`, `modeling_utils`; the models are WM's and Ch's.
"""

import dataclasses
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.utils.generic import can_return_tuple, merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from cheems_lab.checkpoint import load_model
from cheems_ref import check
from cheems_ref.attention import AttentionCache
from cheems_ref.config import ModelConfig
from cheems_ref.model import Block, CausalLM, LayerCache, check_positions, positions
from cheems_ref.rope import RotaryTable
from cheems_ref.ssd import SSDCache

# The file that trust_remote_code=True runs, and its classes.
REMOTE_CODE = "from cheems_lab.hub import CheemsConfig, CheemsForCausalLM, CheemsModel\n"
REMOTE = "modeling_cheems_ref"
AUTO_MAP = {
    "AutoConfig": f"{REMOTE}.CheemsConfig",
    "AutoModel": f"{REMOTE}.CheemsModel",
    "AutoModelForCausalLM": f"{REMOTE}.CheemsForCausalLM",
}
KEPT_IN_FLOAT32 = {"A_log", "dt_bias"}  # the decay, also of a model in sixteen bits

# --- the configuration --------------------------------------------------------------------------

# What other configurations of transformers call a size, and what it is here.
OTHER_NAMES = {
    **dict.fromkeys(["num_hidden_layers", "num_layers", "n_layer", "layer_types"], "pattern"),
    **dict.fromkeys(["n_embd", "dim"], "d_model"),
    **dict.fromkeys(["num_heads", "n_head"], "n_heads"),
    **dict.fromkeys(["head_dim", "mamba_d_head", "expand", "mamba_expand"], "d_head"),
    **dict.fromkeys(["n_inner", "ffn_dim", "moe_intermediate_size"], "d_ff"),
    **dict.fromkeys(["num_experts", "num_local_experts", "n_routed_experts"], "n_experts"),
    "num_experts_per_tok": "k_experts",
    **dict.fromkeys(["state_size", "mamba_d_state"], "d_state"),
    **dict.fromkeys(["conv_kernel", "mamba_d_conv"], "d_conv"),
    **dict.fromkeys(["layer_norm_eps", "layer_norm_epsilon"], "norm_eps"),
    **dict.fromkeys(["rope_parameters", "rope_scaling"], "rope_base"),
    **dict.fromkeys(["max_position_embeddings", "n_positions", "n_ctx"], "max_positions"),
    "top_k": "k_keys",
}
# What they have and these models do not.
NOT_HERE = {"hidden_act", "attention_bias", "mlp_bias", "use_bias", "use_conv_bias"}
NOT_HERE |= {"attention_dropout", "hidden_dropout", "sliding_window"}

FIELDS = dataclasses.fields(ModelConfig)
_ModelFields = dataclasses.make_dataclass(
    "_ModelFields", [(field.name, field.type, field.default) for field in FIELDS], kw_only=True
)


class CheemsConfig(PreTrainedConfig, _ModelFields):
    """The fields of `ModelConfig`, by their names and with its defaults.

    transformers' own names hidden_size, num_attention_heads, num_key_value_heads,
    intermediate_size, tie_word_embeddings, rope_theta and rms_norm_eps are aliases of d_model,
    n_heads, n_kv_heads, d_ff, tie_embeddings, rope_base and norm_eps.

    Raises:
        ValueError, TypeError: as ModelConfig; and ValueError for another size by a name that other
            configurations use, such as num_hidden_layers: it says which field to use.
    """

    model_type = "cheems_ref"
    attribute_map = {  # noqa: RUF012
        "hidden_size": "d_model",
        "num_attention_heads": "n_heads",
        "num_key_value_heads": "n_kv_heads",
        "intermediate_size": "d_ff",
        "tie_word_embeddings": "tie_embeddings",
        "rope_theta": "rope_base",
        "rms_norm_eps": "norm_eps",
    }

    use_cache: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None

    def __post_init__(self, **kwargs):
        for name, value in kwargs.items():
            if value is None:
                continue
            if name in OTHER_NAMES:
                raise ValueError(
                    f"{name} = {value!r} is no field of CheemsConfig; it has {OTHER_NAMES[name]}, "
                    "in config.json too"
                )
            if name in NOT_HERE:
                raise ValueError(f"{name} = {value!r}: Cheems models have nothing of this kind")
        super().__post_init__(**kwargs)
        self.pattern = self.to_model_config().pattern

    @classmethod
    def from_model_config(cls, config: ModelConfig, **others: Any) -> "CheemsConfig":
        """Return the same configuration for transformers; others are fields of PreTrainedConfig."""
        return cls(**dataclasses.asdict(config), **others)

    def to_model_config(self) -> ModelConfig:
        """Return the same configuration for this package, checked."""
        return ModelConfig(**{f.name: getattr(self, f.name) for f in FIELDS})

    @property
    def layer_types(self) -> list[str]:
        """The kind of cache of each letter of the pattern, by its name in transformers."""
        kept = {"S": "linear_attention", "A": "full_attention", "I": "full_attention"}
        if self.inner == "ssd":
            kept["I"] = "hybrid"
        return [kept.get(letter, "moe") for letter in self.pattern]

    @property
    def num_hidden_layers(self) -> int:
        """The number of letters in the pattern."""
        return len(self.pattern)


# --- the cache ----------------------------------------------------------------------------------


class StateCache(DynamicCache):
    """A DynamicCache for a model with states, which counts its tokens itself and cannot be cropped.

    Args:
        config: of the model.
    """

    is_compileable = False  # else generate() would make masks (b, h, t, s) for it

    def __init__(self, config: CheemsConfig):
        super().__init__(config=config)
        self.n_tokens = 0

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return how many tokens the cache has seen, padding included."""
        return self.n_tokens

    def reset(self) -> None:
        """Forget all tokens."""
        super().reset()
        self.n_tokens = 0

    def crop(self, tokens_to_remove: int) -> None:
        """Raise ValueError: a state holds the sum of all tokens, and none can be taken out."""
        raise ValueError(f"a cache with states cannot forget {abs(tokens_to_remove)} tokens")


def make_cache(config: CheemsConfig) -> DynamicCache:
    """Return an empty cache for a model: a StateCache if it has states, else a DynamicCache."""
    return StateCache(config) if _has_states(config) else DynamicCache(config=config)


def _take(cache, config):
    """Turn an empty DynamicCache into one for this model, and refuse caches of other kinds."""
    own = make_cache(config)
    if (
        type(cache) is DynamicCache
        and not cache.offloading
        and not any(map(_is_written, cache.layers))
    ):
        cache.__class__ = type(own)  # the caller keeps his object, and hands it on to the next call
        vars(cache).update(vars(own))
        return
    advice = "leave past_key_values out, or pass DynamicCache() or hub.make_cache(model.config)"
    if type(cache) is not type(own) or cache.offloading:
        kind = type(cache).__name__
        kind += "(offloading=True)" if getattr(cache, "offloading", False) else ""
        raise ValueError(f"past_key_values can't be of type {kind} here: {advice}")
    found, wanted = ([type(layer).__name__ for layer in c.layers] for c in (cache, own))
    if found != wanted:
        raise ValueError(
            f"past_key_values is of another model: its layers are {', '.join(found)}, "
            f"this model's are {', '.join(wanted)}; {advice}"
        )


def _is_written(layer):
    """Return whether a layer of a transformers cache has seen tokens."""
    has_state = any(getattr(layer, "has_previous_state", {}).values())
    return has_state or getattr(layer, "keys", None) is not None


def _has_states(config):
    return not {"linear_attention", "hybrid"}.isdisjoint(config.layer_types)


def _read(layer, real, position_ids) -> LayerCache | None:
    """Convert a layer of a transformers cache to this package's; None if the layer is empty.

    real and position_ids describe the tokens in the cache; real is None without padding.
    """
    state = None
    if getattr(layer, "has_previous_state", {0: False})[0]:
        conv = layer.conv_states[0]
        state = SSDCache(layer.recurrent_states[0], conv.mT if conv.shape[1] else None)
    if getattr(layer, "keys", None) is None:
        return state
    k, v = layer.keys.transpose(1, 2), layer.values.transpose(1, 2)
    return AttentionCache(k, v, real, position_ids, state)


def _write(cache, i, new: LayerCache, length):
    """Write the last `length` tokens of layer i's cache into a transformers cache."""
    state = new
    if isinstance(new, AttentionCache):
        k, v = (t[:, t.shape[1] - length :].transpose(1, 2) for t in (new.k, new.v))
        cache.update(k, v, i)
        state = new.inner
    if state is not None:
        # transformers reads a state only after a convolution's; without one, it has no channels.
        empty = state.state.new_zeros(len(state.state), 0, 1)
        cache.update_conv_state(empty if state.conv is None else state.conv.mT, i)
        cache.update_recurrent_state(state.state, i)


# --- the model ----------------------------------------------------------------------------------


class CheemsBlock(Block, GradientCheckpointingLayer):
    """`Block` with gradient checkpointing."""


class CheemsPreTrainedModel(PreTrainedModel):
    """Settings that transformers reads from both models: initialisation, device placement."""

    config_class = CheemsConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _input_embed_layer = "embedding"
    _no_split_modules = ("CheemsBlock",)
    _skip_keys_device_placement = ("past_key_values",)
    _can_record_outputs = {"hidden_states": CheemsBlock}  # noqa: RUF012

    @torch.no_grad()
    def _init_weights(self, module):
        """Initialise a module with its own `reset_parameters`, keeping weights already loaded.

        transformers protects loaded weights from torch's own functions only.
        """
        own = dict(module.named_parameters(recurse=False))
        loaded = {p: p.clone() for p in own.values() if getattr(p, "_is_hf_initialized", False)}
        if isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)  # as CausalLM's
        elif own and hasattr(module, "reset_parameters"):
            module.reset_parameters()
        for parameter, value in loaded.items():
            parameter.copy_(value)


class CheemsModel(CheemsPreTrainedModel):
    """Embedding, blocks and last norm.

    Args:
        config: `CheemsConfig`.
    """

    def __init__(self, config: CheemsConfig):
        super().__init__(config)
        sizes = config.to_model_config()
        self.embedding = nn.Embedding(sizes.vocab_size, sizes.d_model)
        self.blocks = nn.ModuleList(CheemsBlock(letter, sizes) for letter in sizes.pattern)
        self.norm = nn.RMSNorm(sizes.d_model, eps=sizes.norm_eps)
        self.gradient_checkpointing = False  # set by transformers
        names = {name.rpartition(".")[2] for name, _ in self.named_parameters()}
        self._keep_in_fp32_modules_strict = KEPT_IN_FLOAT32 & names
        self.post_init()

    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: DynamicCache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """Compute the hidden states of each token.

        A prompt, the rest of a prompt and a single token are the same call: pass the cache of the
        call before. It is written in place; with use_cache=False it is only read.

        Args:
            input_ids: (b, l), integers in [0, vocab_size); or else inputs_embeds.
            attention_mask: (b, s), of the s tokens before and in this call; 0 for padding, at any
                place. None for no padding, neither here nor earlier.
            position_ids: (b, l) or (1, l); None to count the real tokens of each row, as is done in
                any case for the earlier tokens of mask="gate".
            past_key_values: the cache of an earlier call, an empty one of `make_cache`, or a new
                DynamicCache(), which becomes one.
            inputs_embeds: (b, l, d), in place of the embedding of input_ids.
            use_cache: whether to return a cache; None as the configuration has it. While training
                with gradient checkpointing there is none.
            kwargs: output_hidden_states and return_dict, for transformers.

        Returns:
            last_hidden_state (b, l, d), undefined at padding; past_key_values; on request
            hidden_states: the embedding, and the output of each block, of the last one after the
            norm.

        Raises:
            ValueError: both or none of input_ids and inputs_embeds; ids out of range; a mask or
                positions of another shape; more tokens than mask="gate" has positions; a cache of
                another kind, or of a model with other layers.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("CheemsModel takes input_ids or inputs_embeds, and not both")
        if input_ids is not None:
            check.token_ids(self.config.vocab_size, input_ids=input_ids)
            inputs_embeds = self.embedding(input_ids.long())
        x, (b, length) = inputs_embeds, inputs_embeds.shape[:2]
        if past_key_values is not None:
            _take(past_key_values, self.config)
        elif use_cache:
            past_key_values = make_cache(self.config)
        past = 0 if past_key_values is None else past_key_values.get_seq_length()
        check.shapes({"b": b, "s": past + length}, attention_mask=(attention_mask, "b s"))
        real = before = now = None
        if attention_mask is not None:
            real = attention_mask.bool()
            before, now = real[:, :past], real[:, past:]
        check_positions(self.config, past + length if real is None else real.sum(1), "input_ids")
        every = torch.ones(b, past + length, dtype=torch.bool, device=x.device)
        none = torch.zeros(b, dtype=torch.int64, device=x.device)
        counted = positions(every if real is None else real, none)
        position_ids = counted[:, past:] if position_ids is None else position_ids
        check.shapes({"l": length}, position_ids=(position_ids, "rows l"))
        position_ids = position_ids.expand(b, length)
        rotary = RotaryTable(position_ids)
        for i, block in enumerate(self.blocks):
            cache = _read(past_key_values.layers[i], before, counted[:, :past]) if past else None
            x, cache = block(
                x,
                position_ids,
                padding_mask=now,
                cache=cache,
                use_cache=use_cache,
                rotary=rotary,
            )
            if cache is not None:
                _write(past_key_values, i, cache, length)
        if use_cache and isinstance(past_key_values, StateCache):
            past_key_values.n_tokens += length
        return BaseModelOutputWithPast(self.norm(x), past_key_values if use_cache else None)


class CheemsForCausalLM(CheemsPreTrainedModel, transformers.GenerationMixin):
    """A causal language model for generate() and Trainer; `from_causal_lm` makes one of a CausalLM.

    Args:
        config: `CheemsConfig`.
    """

    _tied_weights_keys = {"lm_head.weight": "model.embedding.weight"}  # noqa: RUF012

    def __init__(self, config: CheemsConfig):
        super().__init__(config)
        self.model = CheemsModel(config)
        self.lm_head = nn.Linear(config.d_model, config.vocab_size, bias=False)
        self._is_stateful = _has_states(config)  # no speculative decoding, which crops the cache
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: DynamicCache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Compute the logits of the token after each token, and the loss if there are labels.

        Arguments and errors are as in `CheemsModel.forward`, and

        Args:
            labels: (b, l), the ids themselves, shifted here; -100 for no target.
            logits_to_keep: number of tokens at the end, 0 for all; or (n,), their indices.
            kwargs: and options of the loss, such as num_items_in_batch.

        Returns:
            loss, a mean in nats per target, or None; logits (b, l, v), undefined at padding;
            past_key_values and hidden_states as in `CheemsModel.forward`.
        """
        tokens = (input_ids, attention_mask, position_ids, past_key_values, inputs_embeds)
        out = self.model(*tokens, use_cache=use_cache, **kwargs)
        kept = logits_to_keep
        kept = slice(-kept, None) if isinstance(kept, int) else kept
        logits, loss = self.lm_head(out.last_hidden_state[:, kept]), None
        if labels is not None:
            loss = self.loss_function(logits, labels, vocab_size=self.config.vocab_size, **kwargs)
        return CausalLMOutputWithPast(loss, logits, out.past_key_values, out.hidden_states)

    def _prepare_cache_for_generation(self, generation_config, model_kwargs, *rest):
        """Make a StateCache where generate() would make a DynamicCache; refuse all other caches."""
        kind = generation_config.cache_implementation
        if kind not in (None, "dynamic"):
            raise ValueError(
                f"cache_implementation={kind!r} is not for Cheems models: leave it out"
            )
        given = model_kwargs.get("past_key_values")
        if given is not None:
            _take(given, self.config)  # before generate() asks it for its length
        elif self._is_stateful and generation_config.use_cache is not False:
            model_kwargs["past_key_values"] = make_cache(self.config)
            return
        super()._prepare_cache_for_generation(generation_config, model_kwargs, *rest)


transformers.AutoConfig.register("cheems_ref", CheemsConfig, exist_ok=True)
transformers.AutoModel.register(CheemsConfig, CheemsModel, exist_ok=True)
transformers.AutoModelForCausalLM.register(CheemsConfig, CheemsForCausalLM, exist_ok=True)

# --- from this package to transformers ----------------------------------------------------------


@torch.no_grad()
def from_causal_lm(model: CausalLM) -> CheemsForCausalLM:
    """Return a copy of a model for transformers, of the same dtype, device and mode."""
    state = model.state_dict()
    table = state["embedding.weight"]
    head = state.pop("lm_head.weight", table)
    config = CheemsConfig.from_model_config(model.config, dtype=table.dtype)
    copy = CheemsForCausalLM(config).to(table.device, table.dtype)
    copy.load_state_dict(
        {f"model.{name}": t for name, t in state.items()} | {"lm_head.weight": head}
    )
    return copy.train(model.training)


def from_run(path: str | Path, *, device: str | torch.device = "cpu") -> CheemsForCausalLM:
    """Return the model of a training run, in evaluation mode, for transformers.

    Args:
        path: a run's directory, for its newest checkpoint; or a checkpoint.
        device: of the model.

    Raises:
        CheckpointError: it is damaged, or there is none.
    """
    return from_causal_lm(load_model(path, device=device).eval())


def byte_tokenizer() -> transformers.PreTrainedTokenizerFast:
    """Return a tokenizer whose 256 ids are the UTF-8 bytes of a text, as in `cheems_ref.text`.

    Byte 0, which no text contains, ends a text, and pads it on the left.
    """
    signs = sorted(pre_tokenizers.ByteLevel.alphabet())  # one for each byte; 188 are that byte
    themselves = {ord(sign): sign for sign in signs if ord(sign) < 256}
    others = iter(sign for sign in signs if ord(sign) >= 256)
    vocabulary = {themselves.get(byte) or next(others): byte for byte in range(256)}
    vocabulary["\0"] = vocabulary.pop("Ā")  # the sign of byte 0
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        model_input_names=["input_ids", "attention_mask"],
        **dict(eos_token="\0", pad_token="\0", padding_side="left"),
    )


def export(run: str | Path, directory: str | Path) -> Path:
    """Write the model of a training run for transformers, and return the directory.

    It gets weights and configuration, the byte tokenizer, a model card, and a file of one line
    for `trust_remote_code=True`. Files of these names are replaced.

    Args:
        run: as in `from_run`.
        directory: made if it does not exist.

    Raises:
        CheckpointError: as `from_run`.
        ValueError: the model has fewer ids than there are bytes.
    """
    model, directory = from_run(run), Path(directory)
    if model.config.vocab_size < 256:
        raise ValueError(f"the model has {model.config.vocab_size} ids, and a text 256 bytes")
    model.config.auto_map = AUTO_MAP
    model.save_pretrained(directory)
    byte_tokenizer().save_pretrained(directory)
    card = (
        (Path(__file__).parent / "model_card.md")
        .read_text(encoding="utf-8")
        .format(
            pattern=model.config.pattern,
            parameters=model.num_parameters(),
            dtype=str(model.dtype).removeprefix("torch."),
        )
    )
    (directory / "README.md").write_text(card, encoding="utf-8")
    (directory / f"{REMOTE}.py").write_text(REMOTE_CODE, encoding="utf-8")
    return directory
