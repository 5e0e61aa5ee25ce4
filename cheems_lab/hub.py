"""Cheems models in Hugging Face's `transformers`: its Auto classes, generate(), Trainer and files.

    CheemsConfig            ModelConfig, as the library writes it into config.json
    CheemsModel             embedding, blocks and last norm
    CheemsForCausalLM       the same and logits: what generate() and Trainer take
    StateCache              the library's DynamicCache, for models that have states
    from_causal_lm          wraps a model of this package
    from_run                wraps that of a training run
    byte_tokenizer          a tokenizer whose ids are the bytes
    export                  writes all of it into a folder, from which AutoModelForCausalLM loads it

No layer is implemented here: the blocks are `cheems_ref.model.Block`, and so are their initial
weights. Importing this room registers the classes with AutoConfig, AutoModel and
AutoModelForCausalLM under the name "cheems_ref".

The library keeps what a model remembers in a cache that is written in place, each layer's by the
name that `CheemsConfig.layer_types` gives it. Keys and values lie there as (b, g, s, p), the
convolution's tokens as (b, channels, d_conv - 1); states as they are, (b, h, p, n).

    letter                  name in the library     SSDCache, AttentionCache
    S                       linear_attention        state, conv
    A, I                    full_attention          k, v
    I with inner="ssd"      hybrid                  k, v, inner.state
    all others              moe                     nothing

Wrong configurations, ids, masks and caches raise ValueError naming argument and numbers (check.py).
Source: transformers 5.23, `cache_utils`, `modeling_utils`; the models are WM's and Ch's.
"""

import dataclasses
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import cheems_ref
from cheems_lab.checkpoint import load_model
from cheems_ref import check
from cheems_ref.attention import AttentionCache
from cheems_ref.config import ModelConfig
from cheems_ref.model import Block, CausalLM, LayerCache
from cheems_ref.rope import RotaryTable
from cheems_ref.ssd import SSDCache

try:
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel
    from transformers.modeling_layers import GradientCheckpointingLayer
    from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
    from transformers.utils.generic import can_return_tuple, merge_with_config_defaults
    from transformers.utils.output_capturing import capture_outputs
except ModuleNotFoundError as error:
    if error.name not in ("transformers", "tokenizers"):
        raise
    raise ModuleNotFoundError(
        'cheems_lab.hub needs transformers: pip install "cheems-ref[hub]"', name=error.name
    ) from error

# The file that trust_remote_code=True runs, and what transformers takes from it.
REMOTE_CODE = '''"""The classes of cheems_lab, for trust_remote_code=True."""

from cheems_lab.hub import CheemsConfig, CheemsForCausalLM, CheemsModel

__all__ = ["CheemsConfig", "CheemsForCausalLM", "CheemsModel"]
'''
REMOTE = "modeling_cheems_ref"
AUTO_MAP = {
    "AutoConfig": f"{REMOTE}.CheemsConfig",
    "AutoModel": f"{REMOTE}.CheemsModel",
    "AutoModelForCausalLM": f"{REMOTE}.CheemsForCausalLM",
}
KEPT_IN_FLOAT32 = {"A_log", "dt_bias"}  # the decay's, where sixteen bits are asked for
# What the library itself writes into a config.json, or hands to a config, besides its fields.
OF_THE_LIBRARY = {"attn_implementation", "auto_map", "custom_pipelines", "experts_implementation"}
OF_THE_LIBRARY |= {"model_type", "name_or_path", "num_labels", "output_attentions"}
OF_THE_LIBRARY |= {"per_layer_config", "quantization_config", "tie_last_hidden_states"}
OF_THE_LIBRARY |= {"torch_dtype", *transformers.GenerationConfig().to_dict()}

# --- the configuration --------------------------------------------------------------------------

FIELDS = dataclasses.fields(ModelConfig)
_ModelFields = dataclasses.make_dataclass(
    "_ModelFields", [(field.name, field.type, field.default) for field in FIELDS], kw_only=True
)


class CheemsConfig(PreTrainedConfig, _ModelFields):
    """A model's configuration: the fields of `ModelConfig`, by their names and with its defaults.

    The library's names hidden_size, num_attention_heads, num_key_value_heads, intermediate_size and
    tie_word_embeddings stand for d_model, n_heads, n_kv_heads, d_ff and tie_embeddings.

    Raises:
        ValueError: a field is known neither to this version nor to the library; or as ModelConfig.
        TypeError: as ModelConfig.
    """

    model_type = "cheems_ref"
    attribute_map = {  # noqa: RUF012, which the library reads from the class
        "hidden_size": "d_model",
        "num_attention_heads": "n_heads",
        "intermediate_size": "d_ff",
        "tie_word_embeddings": "tie_embeddings",
    }

    use_cache: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None

    def __post_init__(self, **kwargs):
        known = OF_THE_LIBRARY | {*self.attribute_map, "num_key_value_heads"}
        unknown = [name for name in kwargs if name not in known and not name.startswith("_")]
        if unknown:
            raise ValueError(
                f"the configuration has {', '.join(unknown)}, which cheems_ref "
                f"{cheems_ref.__version__} does not know: it was written by a newer version, or is "
                "misspelt"
            )
        super().__post_init__(**kwargs)
        self.pattern = self.to_model_config().pattern

    @classmethod
    def from_model_config(cls, config: ModelConfig, **others: Any) -> "CheemsConfig":
        """Return the same configuration for the library; others are fields of the library."""
        return cls(**dataclasses.asdict(config), **others)

    def to_model_config(self) -> ModelConfig:
        """Return the same configuration for this package, checked."""
        return ModelConfig(**{f.name: getattr(self, f.name) for f in FIELDS})

    @property
    def layer_types(self) -> list[str]:
        """The library's name for what each letter of the pattern keeps in a cache."""
        kept = {"S": "linear_attention", "A": "full_attention", "I": "full_attention"}
        if self.inner == "ssd":
            kept["I"] = "hybrid"
        return [kept.get(letter, "moe") for letter in self.pattern]

    @property
    def num_key_value_heads(self) -> int:
        """The groups of keys and values, as a number also where n_kv_heads is None."""
        return self.n_kv_heads or self.n_heads

    @num_key_value_heads.setter
    def num_key_value_heads(self, number: int | None):
        self.n_kv_heads = number

    @property
    def num_hidden_layers(self) -> int:
        """The number of letters in the pattern."""
        return len(self.pattern)


# --- the cache ----------------------------------------------------------------------------------


class StateCache(DynamicCache):
    """The library's DynamicCache for a model that has states: it counts its tokens, for no state
    tells how many it has seen, and it cannot be cropped.

    Args:
        config: that of the model.
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
        raise ValueError(
            f"a cache with states cannot forget its last {abs(tokens_to_remove)} tokens: copy it "
            "before they are read (copy.deepcopy), or read the text anew"
        )


def make_cache(config: CheemsConfig) -> DynamicCache:
    """Return an empty cache for a model: a StateCache if it has states, else a DynamicCache."""
    return StateCache(config) if _has_states(config) else DynamicCache(config=config)


def _has_states(config):
    return not {"linear_attention", "hybrid"}.isdisjoint(config.layer_types)


def _read(layer, real, position_ids) -> LayerCache | None:
    """One layer of the library's cache, as the package's own; None where nothing is in it yet.

    real and position_ids are those of the tokens that it has seen; real is None without padding.
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
    """What layer i remembers after a call of so many tokens, into the library's cache."""
    state = new
    if isinstance(new, AttentionCache):
        k, v = (t[:, t.shape[1] - length :].transpose(1, 2) for t in (new.k, new.v))
        cache.update(k, v, i)
        state = new.inner
    if state is not None:
        # Only what is written here makes the library believe that there is a state. Without a
        # convolution it is one of no channels.
        none = state.state.new_zeros(len(state.state), 0, 1)
        cache.update_conv_state(none if state.conv is None else state.conv.mT, i)
        cache.update_recurrent_state(state.state, i)


# --- the model ----------------------------------------------------------------------------------


class CheemsBlock(Block, GradientCheckpointingLayer):
    """`Block`, of which the library can keep the input alone and compute it again backwards."""


class CheemsPreTrainedModel(PreTrainedModel):
    """What the library wants to know of both models: how weights start, what stays together."""

    config_class = CheemsConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _input_embed_layer = "embedding"
    _no_split_modules = ("CheemsBlock",)
    _skip_keys_device_placement = ("past_key_values",)
    _can_record_outputs = {"hidden_states": CheemsBlock}  # noqa: RUF012

    @torch.no_grad()
    def _init_weights(self, module):
        """Start a module as it starts itself, but for what was loaded into it.

        The library guards torch's own functions against writing into what was loaded; a
        `reset_parameters` does more than call these.
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
    """Embedding, blocks and last norm: what the logits are read from.

    Args:
        config: `CheemsConfig`.
    """

    def __init__(self, config: CheemsConfig):
        super().__init__(config)
        sizes = config.to_model_config()
        self.embedding = nn.Embedding(sizes.vocab_size, sizes.d_model)
        self.blocks = nn.ModuleList(CheemsBlock(letter, sizes) for letter in sizes.pattern)
        self.norm = nn.RMSNorm(sizes.d_model, eps=sizes.norm_eps)
        self.gradient_checkpointing = False  # the library sets it, and then use_cache to False
        self._layers = [type(layer) for layer in make_cache(config).layers]
        names = dict(self.named_parameters()).keys()
        self._keep_in_fp32_modules_strict = KEPT_IN_FLOAT32 & {n.rpartition(".")[2] for n in names}
        # A matrix that the experts of letter C share is written once.
        every = dict(self.named_parameters(remove_duplicate=False)).keys()
        self._keys_to_ignore_on_save = every - names
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

        A prompt, the rest of a prompt and a single token are the same call: hand in the cache of
        the call before. It is written in place; with use_cache=False it is only read.

        Args:
            input_ids: (b, l), integers in [0, vocab_size); or else inputs_embeds.
            attention_mask: (b, s), of the s tokens that the cache has seen and of these l; 0 for
                padding, which may stand anywhere. None for none, neither here nor earlier.
            position_ids: (b, l) or (1, l); None to count the real tokens of each row, as is done in
                any case for what mask="gate" knows of earlier calls.
            past_key_values: what an earlier call returned, or an empty one of `make_cache`.
            inputs_embeds: (b, l, d), in place of the embedding of input_ids.
            use_cache: whether to return a cache; None as the configuration has it. While training
                with gradient checkpointing there is none.
            kwargs: output_hidden_states and return_dict, which the library looks at.

        Returns:
            last_hidden_state (b, l, d), undefined at padding; past_key_values; hidden_states if
            asked for: the embedding's, and after each block, the last one after the last norm.

        Raises:
            ValueError: both or none of input_ids and inputs_embeds; ids out of range; a mask or
                positions of another length; a cache of another model or of other rows.
        """
        x = self._embedded(input_ids, inputs_embeds)
        b, length = x.shape[:2]
        if use_cache and past_key_values is None:
            past_key_values = make_cache(self.config)
        past = self._tokens_before(past_key_values, b)
        real = self._checked(attention_mask, b, past, length)
        counted = torch.ones(b, past + length, dtype=torch.bool, device=x.device)
        counted = ((counted if real is None else real).cumsum(1) - 1).clamp(min=0)
        before, now = (None, None) if real is None else (real[:, :past], real[:, past:])
        position_ids = counted[:, past:] if position_ids is None else position_ids
        check.shapes({"l": length}, position_ids=(position_ids, "rows l"))
        position_ids = position_ids.expand(b, length)
        shared = dict(padding_mask=now, use_cache=use_cache, rotary=RotaryTable(position_ids))
        for i, block in enumerate(self.blocks):
            cache = _read(past_key_values.layers[i], before, counted[:, :past]) if past else None
            x, cache = block(x, position_ids, cache=cache, **shared)
            if cache is not None:
                _write(past_key_values, i, cache, length)
        if use_cache and isinstance(past_key_values, StateCache):
            past_key_values.n_tokens += length
        return BaseModelOutputWithPast(self.norm(x), past_key_values if use_cache else None)

    def _embedded(self, input_ids, inputs_embeds):
        if (input_ids is None) == (inputs_embeds is None):
            got = "neither" if input_ids is None else "both"
            raise ValueError(f"one of input_ids and inputs_embeds must be handed in, got {got}")
        if input_ids is None:
            check.shapes({"d": self.config.d_model}, inputs_embeds=(inputs_embeds, "b l d"))
            return inputs_embeds
        check.token_ids(self.config.vocab_size, input_ids=input_ids)
        return self.embedding(input_ids.long())

    def _tokens_before(self, cache, b):
        """How many the cache has seen."""
        if cache is None:
            return 0
        layers = [type(layer) for layer in getattr(cache, "layers", ())]
        counts = isinstance(cache, StateCache) or not {"A", "I"}.isdisjoint(self.config.pattern)
        if layers != self._layers or not counts:
            raise ValueError(
                f"past_key_values must be a cache for the pattern {self.config.pattern}: None, or "
                f"one of cheems_lab.hub.make_cache(model.config), got {type(cache).__name__} of "
                f"{len(layers)} layers"
            )
        for layer in cache.layers:
            held = (getattr(layer, "keys", None), getattr(layer, "recurrent_states", {}).get(0))
            for t in held:
                if t is not None and len(t) != b:
                    raise ValueError(f"past_key_values must be of b = {b} rows, got {len(t)}")
        return cache.get_seq_length()

    def _checked(self, mask, b, past, length):
        """The mask as boolean."""
        if mask is None:
            self._check_positions(past + length)
            return None
        if not isinstance(mask, Tensor) or tuple(mask.shape) != (b, past + length):
            got = tuple(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
            raise ValueError(
                f"attention_mask must be (b, s) = {(b, past + length)}, of the {past} tokens in "
                f"the cache and {length} new ones, got {got}"
            )
        return mask.bool()

    def _check_positions(self, tokens):
        """Refuse, as CausalLM does, what is longer than the table of mask="gate"."""
        n = self.config.max_positions
        if self.config.mask == "gate" and "I" in self.config.pattern and tokens > n:
            raise ValueError(f"{tokens} tokens, but mask='gate' has max_positions = {n}")


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
        self._is_stateful = _has_states(config)  # so that no token is drafted and taken back
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

        Arguments and errors are those of `CheemsModel.forward`, and

        Args:
            labels: (b, l), the ids themselves, which the library shifts; -100 for no target.
            logits_to_keep: of how many tokens at the end, 0 for all; or (n,), of which ones.
            kwargs: and what the library's loss takes, such as num_items_in_batch.

        Returns:
            loss, a mean in nats per target, or None; logits (b, l, v), undefined at padding;
            past_key_values and hidden_states as `CheemsModel.forward`.
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
        """Hand out a StateCache where generate() would make a DynamicCache."""
        asked = generation_config.cache_implementation in (None, "dynamic")
        asked = asked and generation_config.use_cache is not False
        if self._is_stateful and asked and model_kwargs.get("past_key_values") is None:
            model_kwargs["past_key_values"] = make_cache(self.config)
            return
        super()._prepare_cache_for_generation(generation_config, model_kwargs, *rest)


transformers.AutoConfig.register("cheems_ref", CheemsConfig, exist_ok=True)
transformers.AutoModel.register(CheemsConfig, CheemsModel, exist_ok=True)
transformers.AutoModelForCausalLM.register(CheemsConfig, CheemsForCausalLM, exist_ok=True)

# --- from this package to the library -----------------------------------------------------------


@torch.no_grad()
def from_causal_lm(model: CausalLM) -> CheemsForCausalLM:
    """Return a copy of a model for the library: the same numbers, dtype and device.

    Args:
        model: it is left as it is, and shares nothing with its copy.
    """
    like = model.embedding.weight
    config = CheemsConfig.from_model_config(model.config, dtype=like.dtype)
    copy = CheemsForCausalLM(config).to(like.device, like.dtype)
    head = model.embedding if model.lm_head is None else model.lm_head
    state = {f"model.{n}": t for n, t in model.state_dict().items() if n != "lm_head.weight"}
    copy.load_state_dict(state | {"lm_head.weight": head.weight})
    return copy.train(model.training)


def from_run(path: str | Path, *, device: str | torch.device = "cpu") -> CheemsForCausalLM:
    """Return the model of a training run, in evaluation mode, for transformers.

    Args:
        path: a run's directory, whose newest checkpoint is taken; or a checkpoint.
        device: where it shall lie.

    Raises:
        CheckpointError: it is damaged, or there is none.
    """
    return from_causal_lm(load_model(path, device=device).eval())


def byte_tokenizer() -> transformers.PreTrainedTokenizerFast:
    """Return a tokenizer whose ids are a text's UTF-8 bytes, as `cheems_ref.text.text_to_ids` has
    them: 256 ids. Byte 0, which texts do without, also ends them, and pads them on the left.
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
    """Write the model of a training run for the library, and return the directory.

    In it are weights and configuration, a tokenizer whose ids are the bytes, a model card, and a
    file of three lines for `trust_remote_code=True`. What is there by these names is replaced.

    Args:
        run: as in `from_run`.
        directory: made where it is not there.

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
    (directory / "README.md").write_text(model_card(model), encoding="utf-8")
    (directory / f"{REMOTE}.py").write_text(REMOTE_CODE, encoding="utf-8")
    return directory


def model_card(model: CheemsForCausalLM) -> str:
    """Return the model card: the fields that differ from their defaults, and how to load it."""
    config = model.config.to_model_config()
    rows = [
        f"| {field.name} | {getattr(config, field.name)} |"
        for field in FIELDS
        if field.name == "d_model"
        or (field.name != "pattern" and getattr(config, field.name) != field.default)
    ]
    return (
        (Path(__file__).parent / "model_card.md")
        .read_text(encoding="utf-8")
        .format(
            pattern=config.pattern,
            sizes="\n".join(rows),
            parameters=model.num_parameters(),
            dtype=str(model.dtype).removeprefix("torch."),
        )
    )
