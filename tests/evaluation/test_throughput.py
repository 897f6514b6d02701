import torch
from transformers import DynamicCache

from sse_convert.evaluation.throughput import allocated_cache_bytes, throughput


def test_speed_and_measured_bytes_of_a_softmax_model(llama):
    slow, fast = throughput(llama, [32, 64], repeats=2, decode_tokens=4)
    head_dim = llama.config.hidden_size // llama.config.num_attention_heads
    per_token = 2 * llama.config.num_hidden_layers * llama.config.num_key_value_heads * head_dim * 4
    assert (slow.cache_bytes, fast.cache_bytes) == (32 * per_token, 64 * per_token)
    assert slow.prefill_tokens_per_s > slow.decode_tokens_per_s > 0
    assert slow.to_dict()["repeats"] == 2


def test_cache_bytes_counts_shared_storage_once_and_views_in_full():
    cache = DynamicCache()
    keys = torch.zeros(1, 2, 10, 4)
    cache.update(keys, keys, 0)
    layer = cache.layers[0]
    layer.keys = layer.values = keys[:, :, 5:]
    layer.states = {0: torch.zeros(3, dtype=torch.bfloat16)}
    assert allocated_cache_bytes(cache) == 80 * 4 + 6
