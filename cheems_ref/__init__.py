"""An executable reference for Cheems / Wonderful Matrices; README.md lists its modules.

    layers       ssd, attention                                  mix the tokens of a text
                 feed_forward, experts, retrieval                treat each token by itself
                 rope, convolution                               positions, for ssd and attention
    model        config, presets, model                          a pattern of layers, from a string
    training     train, tasks, compare, distributed
    costs        budget, roofline, triton_ssd, compiler
    background   state_space, mamba, linear_attention            lessons; no model has these layers
    tools        check, verify, precision, plotting, text, kernels

Sources are cited as WM (*Wonderful Matrices*), Ch (*Cheems*) and OTCE (*OTCE*), all by Shi et al.,
and L22, lecture 22 of CMU 10-423 on state space models and hybrids.
"""

__version__ = "0.1.0"
