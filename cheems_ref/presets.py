"""The configurations behind `config.preset`: numbers of the sources, and our own.

The sources give patterns, d_model, layers, heads, groups of keys, state width, chunk length, rows
of values, numbers of experts and the size in the name. Numbers that they leave open are ours:

* WM Table 7: d_ff (chosen so that the number of parameters comes nearest to the name), one routed
  expert per token, heads, width of a query and neurons per head of the retrieval, and tied
  embeddings. 3,072 and 8,192 experts are not squares, so we take the next squares, 3,136 and
  8,281. The vocabulary is the NeoX tokenizer's. Jamba and Mamba-2 get positions from a
  convolution, as published.
* WM §5 describes Doge in one sentence without sizes: all of its sizes are ours.
* Ch gives widths of the shared and private domain and the number of experts; the rest is ours.
* OTCE Tables 1, 6 and 8: only Table 1 gives d_ff, and the vocabulary is missing; we take NeoX's.
  Their state-space layer is Mamba's, twice as wide inside as the stream (d_head). Ours is SSD,
  which has no gate. Table 1's models have no rotary positions; our A always has them.
* Llama 2, Mistral, Mixtral and Jamba serve to compare caches: every number is from the published
  configuration. Jamba's state-space layer is Mamba's again.
"""

_NEOX = 50277
_RETRIEVAL = dict(n_retrieval_heads=4, k_neurons=16, d_query=256)  # ours

_320M = dict(vocab_size=_NEOX, d_model=768, n_heads=12, d_state=128, chunk_size=256, k_experts=1)
_1B = dict(_320M, d_model=2048, n_heads=32)
_CHEEMS_320M = dict(_320M, **_RETRIEVAL, n_values=6, n_neurons=3136)
_CHEEMS_1B = dict(_1B, **_RETRIEVAL, n_values=16, n_neurons=8281)
_LLAMA, _MAMBA2, _JAMBA = "AH × 24", "SH × 24", "(SH SH SH SH AH SH SH SH) × 3"
_CHEEMS, _CHEEMS_V1, _DOGE = "(SE × 7 + IE) × 3", "(SK × 7 + IK) × 2", "IEE × 12"

_OTCE = dict(vocab_size=_NEOX, d_model=1024, n_heads=16, d_head=128)
_OTCE_1B = dict(_OTCE, n_kv_heads=2, d_state=64)
_OTCE_281M = dict(_OTCE, n_kv_heads=8, d_state=16, position="conv", d_ff=4096)
_OTCE_X = "SD + SX × 11 + AX × 2 + SX × 8 + SD + AD"
_OTCE_JAMBA = "(SD + SR + SD + SR + AD + SR + SD + SR) × 3"

_PUBLIC = dict(d_model=4096, n_heads=32, vocab_size=32000, tie_embeddings=False)
_MISTRAL = dict(_PUBLIC, d_ff=14336, n_kv_heads=8)
_JAMBA_52B = dict(_MISTRAL, vocab_size=65536, d_head=256, d_state=16, position="conv")

_TINY = dict(d_model=64, n_heads=4, d_state=16, d_ff=128, n_values=8, n_neurons=144)
_TINY |= dict(n_retrieval_heads=2, k_neurons=4, d_query=16)

PRESETS = {
    # WM Table 7
    "llama-320m": dict(_320M, pattern=_LLAMA, d_ff=816),
    "mamba2-320m": dict(_320M, pattern=_MAMBA2, d_ff=896, position="conv"),
    "jamba-320m": dict(_320M, pattern=_JAMBA, d_ff=880, position="conv"),
    "cheems-320m": dict(_CHEEMS_320M, pattern=_CHEEMS, d_ff=2992),
    "llama-1.3b": dict(_1B, pattern=_LLAMA, d_ff=1072),
    "mamba2-1.3b": dict(_1B, pattern=_MAMBA2, d_ff=1328, position="conv"),
    "jamba-1.3b": dict(_1B, pattern=_JAMBA, d_ff=1296, position="conv"),
    "cheems-1.3b": dict(_CHEEMS_1B, pattern=_CHEEMS, d_ff=992),
    # WM §5, all sizes ours
    "doge-320m": dict(_CHEEMS_320M, pattern=_DOGE, d_ff=3264, mask="content"),
    "doge-1.3b": dict(_CHEEMS_1B, pattern=_DOGE, d_ff=6704, n_neurons=3136, mask="content"),
    # Ch §3.3 and §3.4
    "cheems-v1-1.3b": dict(
        _CHEEMS_1B, pattern=_CHEEMS_V1, inner="ssd", d_ff=4096, d_private=2048, n_neurons=4096
    ),
    # OTCE Table 1, without MoE
    "jamba-283m": dict(_OTCE_281M, pattern="SD SD SD SD AD SD SD SD"),
    "otce-281m": dict(_OTCE_281M, pattern="SD SD SD SD AD SD SD AD"),
    # OTCE Table 6: shared-expert isolation, cohesive, expansive
    "otce-seimoe-1b": dict(_OTCE_1B, pattern="SD + SH × 11 + AH × 2 + SH × 8 + SD + AD", d_ff=2560),
    "otce-ccdmoe-1b": dict(_OTCE_1B, pattern="SD + SC × 11 + AC × 2 + SC × 8 + SD + AD", d_ff=4192),
    "otce-ecdmoe-1b": dict(_OTCE_1B, pattern=_OTCE_X, d_ff=2304),
    # OTCE Table 8
    "jamba-1b": dict(_OTCE_1B, pattern=_OTCE_JAMBA, d_ff=4608, k_experts=1, position="conv"),
    "otce-1b": dict(_OTCE_1B, pattern=_OTCE_X, d_ff=2304, k_experts=1),
    # as published
    "llama-2-7b": dict(_PUBLIC, pattern="AG × 32", d_ff=11008),
    "mistral-7b": dict(_MISTRAL, pattern="AG × 32"),
    "mixtral-8x7b": dict(_MISTRAL, pattern="AR × 32", n_experts=8),
    "jamba-52b": dict(_JAMBA_52B, pattern="(SG SR SG SR AG SR SG SR) × 4", n_experts=16),
    # to run on a laptop, all sizes ours
    "llama-tiny": dict(_TINY, pattern="AM × 8"),
    "mamba2-tiny": dict(_TINY, pattern="SM × 8", position="conv"),
    "jamba-tiny": dict(_TINY, pattern="SM SR SM SR AM SR SM SR", position="conv", d_ff=64),
    "cheems-tiny": dict(_TINY, pattern="SE × 7 + IE"),
    "cheems-v1-tiny": dict(_TINY, pattern="SK × 7 + IK", inner="ssd"),
    "doge-tiny": dict(_TINY, pattern="IEE × 4", mask="content"),
    "otce-tiny": dict(_TINY, pattern="SD + SX × 2 + AX × 2 + SX + SD + AD", d_ff=64, n_kv_heads=2),
}
