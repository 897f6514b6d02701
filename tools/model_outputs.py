"""What a causal language model computes from fixed inputs: the figures by which two versions of a code are compared.

Needs torch and a transformers model alone, so that a checkpoint can be asked through the code that travels with it.
"""

import torch
from torch import Tensor
from transformers import PreTrainedModel

PAD, FIRST = 0, 3
"""the padding token, and the first token id that is drawn"""
DOCUMENTS = (6, 1, 9, 4)
"""tokens of the packed documents"""


def compute(model: PreTrainedModel) -> dict[str, Tensor]:
    """Logits of a left-padded batch and of packed documents, tokens and logits of a cached generation, and a training
    step's loss and gradients; the same inputs on every call."""
    vocabulary = model.config.vocab_size
    ids = torch.randint(FIRST, vocabulary, (2, 11), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, :4], ids[1, :4] = 0, PAD
    packed = torch.randint(FIRST, vocabulary, (1, sum(DOCUMENTS)), generator=torch.Generator().manual_seed(2))
    positions = torch.cat([torch.arange(length) for length in DOCUMENTS])[None]
    with torch.no_grad():
        padded = model(ids, attention_mask=mask).logits
        documents = model(packed, position_ids=positions, use_cache=False).logits
        made = model.generate(
            ids, attention_mask=mask, max_new_tokens=5, min_new_tokens=5, do_sample=False,
            return_dict_in_generate=True, output_logits=True,
        )  # fmt: skip
    results = {"padded": padded, "packed": documents, "tokens": made.sequences, "generated": torch.stack(made.logits)}
    return results | _training_step(model.train(), packed, positions)


def _training_step(model: PreTrainedModel, ids: Tensor, positions: Tensor) -> dict[str, Tensor]:
    torch.manual_seed(0)  # of the dropout of some families
    if hasattr(model, "sse_draw_windows"):
        model.sse_draw_windows(0, 0)
    loss = model(ids, position_ids=positions, use_cache=False, labels=ids).loss
    loss.backward()
    gradients = {f"gradient.{name}": p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach(), **gradients}
