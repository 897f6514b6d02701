"""Row-sparse updates as such (paper, section 3): a token writes the state rows its key selects and spares the others.

Reading order: update, definition, operators, layers, mixers, model; then recall (the experiment of Figure mqa_topk),
claims (what it says about the paper), propositions (Appendix A in numbers).

Every module runs R independent models of one shape at once, so that a sweep over seeds, learning rates and sparsity is
one program; R = 1 is an ordinary model.

Shape letters: R models, B rows of a batch, T tokens, W model width, H heads, D state rows per head (key dim or slots),
V value dim, K queries of a row, E row-heads.
"""
