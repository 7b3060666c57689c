"""Numbers: pure functions, arrays in and arrays out.

Axis letters, used in shape comments everywhere below (``# [B, T, D] bf16``):

    B rows of a batch      T tokens of a chunk     S slots              L layers
    D hidden               H hyper-connections     N attention heads    K head dim
    R rotated channels     Q low-rank query        G output groups      W sliding window
    C compressed rows      I indexer heads         J indexer dim        E experts
    X experts a token      F expert width          V vocabulary         M = B*T, all tokens of a step

The mathematics follows DeepSeek V4 as ds4 runs it; a formula's source is named where it is used.
"""
