import dataclasses as dc, pytest, torch
from tests.kernels.triton.trials import Trial, assert_right
BF16=torch.bfloat16
T=[Trial(delta=True,lengths=(70,3)), Trial(delta=True,lengths=(400,30),num_partitions=2,initial_state=True), 
 Trial(delta=True,lengths=(63,0,64,1,65),top_k=2,read_top_k=3,groups=2,heads=2,initial_state=True),
 Trial(delta=True,lengths=(200,),num_partitions=1,dtype=BF16),
 Trial(delta=True,lengths=(200,30),num_partitions=2,dtype=BF16,dim=64,value_dim=64,heads=2),
 Trial(delta=True,lengths=(200,30),num_partitions=2,dtype=BF16,dim=128,value_dim=128,heads=2,groups=2),
 Trial(delta=True,lengths=(70,30),decays="mixed",initial_state=True,top_k=2),
 Trial(delta=True,lengths=(70,30),decays="mixed",dtype=BF16,top_k=2),
 Trial(delta=True,per_partition=True,top_k=2,k_map="l2",value_dim=24,k_scale=True,normalizer=16.0,read_top_k=1),
]
@pytest.mark.parametrize("trial",T,ids=str)
@pytest.mark.parametrize("slab",[1,2**29])
def test_it(trial, device, monkeypatch, slab):
    from sse_convert.kernels.triton import launch
    monkeypatch.setattr(launch,"SLAB_BYTES",slab)
    assert_right(trial, trial.rounded(device))
