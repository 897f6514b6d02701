"""Attention inside chunks: the decay between two tokens is built by doubling blocks, from one token to the chunk.

Each block carries three things: its queries decayed from the block's start, its keys decayed to the block's end, and
its total decay. Two neighbouring blocks meet in one matmul (queries of the right one, keys of the left one) and merge
with one multiplication each. Every factor is a product of decays, so it lies in [0, 1]: nothing overflows however
strong the decay, and no logarithms are subtracted. No factor comes from a later token, so a result keeps every bit
when later tokens change (on the CPU, with head dims that are multiples of 4: odd ones shift the alignment of matrices
when routes change, and matrix libraries round by it).

Shape letters beside those of the package: E chunks times state heads, X = C * G query rows of a chunk.
"""

import dataclasses as dc
from collections.abc import Iterator

import torch
from torch import Tensor


def grouped(x_EXD: Tensor, G: int) -> Tensor:
    """View [E, C, G, D] of rows."""
    return x_EXD.view(x_EXD.shape[0], x_EXD.shape[1] // G, G, x_EXD.shape[2])


def scaled(q: Tensor, decay: Tensor) -> Tensor:
    """q [..., n * G, D] times the decay [..., n, D] of its token."""
    return (q.view(*decay.shape[:-1], -1, decay.shape[-1]) * decay[..., None, :]).flatten(-3, -2)


def decay_tree(decay_ECD: Tensor) -> list[Tensor]:
    """Total decay of every block of 1, 2, 4 ... C tokens: [E, C / size, D] each."""
    tree = [decay_ECD]
    while tree[-1].shape[1] > 1:
        tree.append(tree[-1][:, 0::2] * tree[-1][:, 1::2])
    return tree


def _levels(tree: list[Tensor]) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Pairs of neighbouring blocks: their size, and the decays [E, pairs, 1, D] of the left and of the right one."""
    for i, decay in enumerate(tree[:-1]):
        yield 2**i, decay[:, 0::2, None], decay[:, 1::2, None]


def _halves(x_EXD: Tensor, pairs: int) -> tuple[Tensor, Tensor]:
    """Views [E, pairs, rows, D] of the left and of the right block of each pair."""
    E, X, D = x_EXD.shape
    left, right = x_EXD.view(E, pairs, 2, X // (2 * pairs), D).unbind(2)
    return left, right


def _across(scores_EXC: Tensor, half: int) -> Tensor:
    """View [E, pairs, rows of the right block, half] of what right blocks read from left blocks."""
    E, X, C = scores_EXC.shape
    pairs = C // (2 * half)
    blocks = scores_EXC.view(E, pairs, 2, X // (2 * pairs), pairs, 2, half)[:, :, 1, :, :, 0]
    return blocks.diagonal(dim1=1, dim2=3).movedim(-1, 1)


def _own(scores_EXC: Tensor) -> Tensor:
    """View [E, C, G] of what tokens read from themselves."""
    E, X, C = scores_EXC.shape
    return scores_EXC.view(E, C, X // C, C).diagonal(dim1=1, dim2=3).movedim(-1, 1)


def within_chunks(q_EXD: Tensor, k_ECD: Tensor, tree: list[Tensor]) -> Tensor:
    """Scores [E, X, C]; then q has become q decayed from the chunk's start, and k has become k decayed to its end."""
    E, C, _ = k_ECD.shape
    q_ECGD = grouped(q_EXD, q_EXD.shape[1] // C)
    scores_EXC = q_EXD.new_zeros(E, q_EXD.shape[1], C)
    _own(scores_EXC).copy_((q_ECGD * k_ECD[:, :, None]).sum(-1))
    q_ECGD *= tree[0][:, :, None]
    for half, decay_left, decay_right in _levels(tree):
        _, q_right = _halves(q_EXD, C // (2 * half))
        k_left, _ = _halves(k_ECD, C // (2 * half))
        _across(scores_EXC, half).copy_(q_right @ k_left.mT)
        q_right *= decay_left
        k_left *= decay_right
    return scores_EXC


@dc.dataclass(frozen=True, slots=True)
class Gradients:
    """Gradients of the tokens of one or more blocks, added to in place. Shapes [..., n * G, D] and [..., n, D].

    The log-decay of a token gets q dq of every later read (and its own) that it decayed, and k dk of every earlier
    write: sums of what really passed through it, so nothing cancels where decays are strong.
    """

    q: Tensor
    k: Tensor
    log_decay: Tensor

    def halves(self, pairs: int) -> tuple["Gradients", "Gradients"]:
        """The left and the right block of each pair."""
        left, right = zip(*(_halves(x, pairs) for x in (self.q, self.k, self.log_decay)), strict=True)
        return Gradients(*left), Gradients(*right)

    def add_reads(self, decayed_q: Tensor, d_decayed_q: Tensor, from_start: Tensor) -> None:
        """For decayed_q = q * from_start, the decay since before the block."""
        by_token = (*from_start.shape[:-1], -1, from_start.shape[-1])
        self.q.view(by_token).addcmul_(d_decayed_q.view(by_token), from_start[..., None, :])
        passed = (decayed_q * d_decayed_q).view(by_token).sum(-2)
        self.log_decay.add_(passed.flip(-2).cumsum(-2).flip(-2))

    def add_writes(self, decayed_k: Tensor, d_decayed_k: Tensor, to_end: Tensor) -> None:
        """For decayed_k = k * to_end, the decay from after the token to the block's end."""
        self.k.addcmul_(d_decayed_k, to_end)
        passed = decayed_k[..., :-1, :] * d_decayed_k[..., :-1, :]
        self.log_decay[..., 1:, :].add_(passed.cumsum(-2))


def within_chunks_backward(
    q_EXD: Tensor, k_ECD: Tensor, tree: list[Tensor], d_scores_EXC: Tensor, gradients: Gradients
) -> tuple[Tensor, Tensor, Tensor]:
    """Adds to `gradients` what the scores send; returns the scores [E, X, C] and, as [E, C, D], the decays of every
    token since before the chunk and to the chunk's end.
    """
    C, G = k_ECD.shape[1], q_EXD.shape[1] // k_ECD.shape[1]
    q_ECGD, own_ECG1 = grouped(q_EXD, G), _own(d_scores_EXC)[..., None]
    scores_EXC = torch.zeros_like(d_scores_EXC)
    _own(scores_EXC).copy_((q_ECGD * k_ECD[:, :, None]).sum(-1))
    grouped(gradients.q, G).addcmul_(own_ECG1, k_ECD[:, :, None])
    gradients.k.add_((own_ECG1 * q_ECGD).sum(2))
    from_start_ECD, to_end_ECD = tree[0].clone(), torch.ones_like(tree[0])
    for half, decay_left, decay_right in _levels(tree):
        pairs = C // (2 * half)
        left, right = gradients.halves(pairs)
        _, start_right = _halves(from_start_ECD, pairs)
        end_left, _ = _halves(to_end_ECD, pairs)
        q_right = scaled(_halves(q_EXD, pairs)[1], start_right)
        k_left = _halves(k_ECD, pairs)[0] * end_left
        _across(scores_EXC, half).copy_(q_right @ k_left.mT)
        d_across = _across(d_scores_EXC, half).contiguous()
        right.add_reads(q_right, d_across @ k_left, start_right)
        left.add_writes(k_left, d_across.mT @ q_right, end_left)
        start_right *= decay_left
        end_left *= decay_right
    return scores_EXC, from_start_ECD, to_end_ECD
