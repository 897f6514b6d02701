"""What transformers does once in a process that loads a model: it compiles its rules for the names of tensors."""

from transformers.conversion_mapping import get_checkpoint_conversion_mapping

get_checkpoint_conversion_mapping("llama")
