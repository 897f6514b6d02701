import torch

from benchmarks.analysis.routes import of_written, read
from sse_convert.analysis.capture import see
from tests.analysis.cases import inputs, sizes


def test_what_is_read_and_of_written():
    route = torch.tensor([2, 0, 1])
    arguments = inputs(sizes(partitions=3), 3, router_logits=torch.eye(3).double()[route], top_k=1, read_top_k=2)
    found = see(arguments, torch.tensor([0, 3]), torch.arange(3))
    assert read(found).sum(1).tolist() == [2, 2, 2]
    own = torch.arange(9.0).view(3, 3, 1, 1)
    assert of_written(found, own).flatten().tolist() == [2.0, 3.0, 7.0]
    assert of_written(found, own[:, :1]).flatten().tolist() == [0.0, 3.0, 6.0]
