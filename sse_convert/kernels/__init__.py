"""The SSE operator: one definition, several backends that agree with it, one place that routes.

Reading order: routing; in `torch` reference, chunk, delta_rule, varlen, recurrent; then dispatch.

Shape letters: B batch, T tokens of all sequences packed, S sequences, H state (key-value) heads, G query heads per
state head (query head h * G + g reads state head h), Hq = H * G query heads, D key dim, V value dim, N partitions,
K selected partitions, P 1 or N (inputs common to the partitions, or one per partition), M partitions in the state: N,
plus one if there is a shared partition, which is the last. R rows (slots), L chunks, C tokens per chunk.
"""
