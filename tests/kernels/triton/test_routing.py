"""Selection and slot order of the kernels against torch.sort and against lists."""

import dataclasses as dc
from itertools import accumulate, groupby

import pytest
import torch
from torch import Tensor

from sse_convert.kernels.routing import route
from sse_convert.kernels.triton import routing
from sse_convert.kernels.triton.routing import SlotLayout, select_partitions, slot_layout
from tests.tolerance import assert_same

GARBAGE = -123_456_789


@pytest.fixture(autouse=True)
def poison_integers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Table entries that no kernel writes keep a number that no table holds."""
    empty = torch.empty

    def poisoned(*args, **kwargs) -> Tensor:
        x = empty(*args, **kwargs)
        return x.fill_(GARBAGE) if x.dtype == torch.int32 else x

    monkeypatch.setattr(torch, "empty", poisoned)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("N", [1, 2, 3, 4, 16, 64, 100])
def test_selects_as_the_reference_does(dtype: torch.dtype, N: int, device: str) -> None:
    """Low precision logits and integers tie often."""
    logits = torch.cat([torch.randn(40, N), torch.randint(3, (37, N)).float(), torch.zeros(1, N)]).to(device, dtype)
    for K in sorted({1, min(2, N), N}):
        used, gate = select_partitions(logits, K)
        exact = route(logits, K)
        assert torch.equal(used.long(), exact.used_TK)
        assert_same(gate, exact.gate_TN.gather(1, exact.used_TK), "gate", 1e-6)
        assert used.dtype == torch.int32
        assert gate.dtype == torch.float32


def test_one_partition_is_not_selected(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routing, "launch", None)
    used, gate = select_partitions(torch.zeros(5, 1, device=device), 1)
    assert used.tolist() == [[0]] * 5
    assert gate.tolist() == [[1.0]] * 5


@pytest.mark.parametrize(("N", "K"), [(1, 1), (2, 1), (3, 3), (16, 2), (64, 5)])
def test_gradient_of_the_gate(N: int, K: int, device: str) -> None:
    logits = torch.randn(71, N, device=device, requires_grad=True)
    used, gate = select_partitions(logits, K)
    weight = torch.randn(71, K, device=device)
    (d_logits,) = torch.autograd.grad((gate * weight).sum(), logits)
    exact = torch.softmax(logits.double(), -1).gather(1, used.long())
    (expected,) = torch.autograd.grad((exact * weight.double()).sum(), logits)
    assert_same(d_logits, expected, "d logits", 1e-5 if N > 1 else 1e-4)
    assert not used.requires_grad


def test_the_gradient_has_the_dtype_of_the_logits(device: str) -> None:
    logits = torch.randn(9, 4, device=device).bfloat16().requires_grad_()
    gate = select_partitions(logits, 2)[1]
    gate[:, 0].sum().backward()
    assert logits.grad is not None
    assert logits.grad.dtype == torch.bfloat16
    assert logits.grad.count_nonzero() > 0


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_logits_that_are_not_finite_stay_inside_the_partitions(bad: float, device: str) -> None:
    logits = torch.randn(6, 5, device=device)
    logits[2, 3] = bad
    used, gate = select_partitions(logits, 3)
    exact = route(logits, 3)
    assert torch.equal(used.long(), exact.used_TK)
    assert torch.equal(gate.isnan(), exact.gate_TN.gather(1, exact.used_TK).isnan())


def test_selection_passes_opcheck(device: str) -> None:
    logits = torch.randn(10, 4, device=device, requires_grad=True)
    torch.library.opcheck(routing._select, (logits, 2))
    torch.library.opcheck(routing._select_backward, (logits.detach(), *select_partitions(logits.detach(), 2)))


def test_selection_of_no_tokens(device: str) -> None:
    used, gate = select_partitions(torch.empty(0, 4, device=device), 2)
    assert used.shape == gate.shape == (0, 2)


@dc.dataclass(frozen=True)
class Case:
    lengths: tuple[int, ...]
    N: int = 4
    K: int = 1
    shared: bool = True
    packed: bool = False
    states: bool = False
    group: int = 2
    route: str = "random"

    def __str__(self) -> str:
        changed = (f for f in dc.fields(self) if getattr(self, f.name) != f.default)
        return "-".join(f"{f.name}={getattr(self, f.name)}" for f in changed).replace(" ", "")

    @property
    def cu_seqlens(self) -> Tensor:
        return torch.tensor([0, *accumulate(self.lengths)])

    def used(self) -> Tensor:
        T = sum(self.lengths)
        score = torch.rand(T, self.N)
        if self.route == "one":
            score[:, self.N - 1] = 2
        if self.route == "skewed":
            score = score * torch.tensor([1.0, *[0.6] * (self.N - 1)])
        return score.argsort(1, descending=True)[:, : self.K].int().contiguous()

    def layout(self, used: Tensor, cu_seqlens: Tensor, device: str = "cpu") -> SlotLayout:
        return slot_layout(
            used.to(device), cu_seqlens.to(device), num_partitions=self.N, shared=self.shared, packed=self.packed,
            states=self.states, group_chunks=self.group,
        )  # fmt: skip


LENGTHS = (
    (),
    (0,),
    (1,),
    (63,),
    (64,),
    (65,),
    (200,),
    (0, 64, 0),
    (0, 63, 1, 0, 65, 128, 0),
    (130, 7, 300, 0, 64),
    (3,) * 40,
)
CASES = [
    *(Case(lengths, packed=packed) for lengths in LENGTHS for packed in (False, True)),
    *(Case(lengths, states=True, K=2, N=3) for lengths in LENGTHS),
    *(Case((130, 7, 0, 300), N=N, K=K, packed=packed) for packed in (False, True)
      for N, K in ((1, 1), (2, 1), (2, 2), (3, 3), (16, 1), (16, 4), (16, 16), (64, 1), (100, 2))),
    *(Case((70, 9), N=64, K=K, packed=packed) for packed in (False, True) for K in (3, 64)),
    *(Case((130, 7, 0, 300), shared=False, packed=packed, K=K) for packed in (False, True) for K in (1, 4)),
    *(Case((130, 7, 300), K=2, packed=packed, route=route) for packed in (False, True) for route in ("one", "skewed")),
    *(Case((130, 7, 300), N=8, states=states, group=group, route="one") for states in (0, 1) for group in (1, 2, 16)),
    *(Case((700,), N=2, packed=packed, group=group) for packed in (False, True) for group in (1, 3, 64)),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=str)
def test_layout_equals_the_one_of_lists(case: Case, device: str) -> None:
    used = case.used()
    assert_equals_lists(case, case.layout(used, case.cu_seqlens, device), used)


@pytest.mark.parametrize("packed", [False, True])
def test_offsets_may_be_int32(packed: bool, device: str) -> None:
    case = Case((70, 0, 65), packed=packed)
    used = case.used()
    assert_equals_lists(case, case.layout(used, case.cu_seqlens.int(), device), used)


@pytest.mark.parametrize("packed", [False, True])
def test_sorting_passes_opcheck(packed: bool, device: str) -> None:
    case = Case((70, 65), packed=packed)
    sizes = routing._sizes(135, 1, 2, case.N, True, packed, case.group)
    arguments = (case.used().to(device), case.cu_seqlens.to(device), case.N, True, packed, False, case.group, *sizes)
    torch.library.opcheck(routing._sort, arguments, test_utils=("test_schema", "test_faketensor"))


def test_compiles_as_one_graph_for_all_lengths(device: str) -> None:
    def routed(logits: Tensor, cu_seqlens: Tensor, group_chunks: int) -> tuple[Tensor, Tensor, int]:
        used, gate = select_partitions(2 * logits, 2)
        layout = slot_layout(
            used, cu_seqlens, num_partitions=4, shared=True, packed=False, states=False, group_chunks=group_chunks
        )
        return gate.sum(), layout.token, layout.num_shared_chunks

    compiled = torch.compile(routed, backend="aot_eager", fullgraph=True, dynamic=True)
    torch._dynamo.utils.counters.clear()
    for T, group_chunks in ((100, 4), (130, 5), (200, 6), (1155, 4), (1160, 4)):  # the last have 63 and 64 chunks
        logits = torch.randn(T, 4, device=device, requires_grad=True)
        arguments = logits, torch.tensor([0, 30, T], device=device), group_chunks
        (loss, token, shared), expected = compiled(*arguments), routed(*arguments)
        assert torch.equal(token, expected[1])
        assert shared == expected[2]
        assert torch.equal(*(torch.autograd.grad(x, logits)[0] for x in (loss, expected[0])))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize("packed", [False, True])
def test_layout_of_more_pieces_than_are_summed_at_once(
    packed: bool, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sse_convert.kernels.triton.routing.SCAN", 4)
    case = Case((130, 7, 300, 0, 64, 9, 9, 300), packed=packed, K=2)
    used = case.used()
    assert_equals_lists(case, case.layout(used, case.cu_seqlens, device), used)


@pytest.mark.parametrize("states", [False, True])
def test_an_aligned_segment_does_not_see_what_follows(states: bool, device: str) -> None:
    """What a token's chunk and group hold up to the token is the same whatever comes after it."""
    case = Case((150, 90), states=states)
    used = case.used()
    changed = used.clone()
    changed[120:] = (changed[120:] + 1) % case.N
    for token in (0, 63, 64, 100, 119):
        assert past(case.layout(used, case.cu_seqlens, device), token, case.N) == past(
            case.layout(changed, case.cu_seqlens, device), token, case.N
        )


def past(layout: SlotLayout, token: int, N: int) -> list[list[list[int]]]:
    """For each slot of a token: the chunks of its group up to its own, cut off after the slot."""
    tokens, segments = layout.token.tolist(), layout.segment.tolist()
    groups = list(zip(layout.group_first.tolist(), layout.group_end.tolist(), strict=True))
    found = []
    for slot in (r for r, t in enumerate(tokens) if t == token):
        (first,) = (a for a, b in groups if a <= slot // 64 < b)
        found.append([[tokens[r], segments[r]] for r in range(first * 64, slot + 1)])
    return found


def assert_equals_lists(case: Case, layout: SlotLayout, used: Tensor) -> None:
    expected = expected_layout(case, used)
    for field in dc.fields(SlotLayout):
        value = getattr(layout, field.name)
        found = value.tolist() if isinstance(value, Tensor) else value
        assert found == expected[field.name], field.name
        assert isinstance(value, int) or value.dtype == torch.int32


def expected_layout(case: Case, used: Tensor) -> dict[str, list[int] | int]:
    """The layout, slot by slot."""
    T, S, M = sum(case.lengths), len(case.lengths), case.N + case.shared
    sequence = [s for s, length in enumerate(case.lengths) for _ in range(length)]
    shared = [(t, case.K * T + t, case.N * S + sequence[t]) for t in range(T)] if case.shared else []
    sparse = [
        (t, row.index(p) * T + t, p * S + sequence[t])
        for p in range(case.N) for t, row in enumerate(used.tolist()) if p in row
    ]  # fmt: skip
    regions = []
    for rows, segments in ((shared, min(S, T)), (sparse, min(S * case.N, T * case.K))):
        if case.packed:
            chunks, bound = cut(rows), -(-len(rows) // 64)
        else:
            chunks = [chunk for _, own in groupby(rows, key=lambda row: row[2]) for chunk in cut(list(own))]
            bound = (len(rows) + 63 * segments) // 64 if rows else 0
        regions.append((chunks, bound))
    tables = {name: [] for name in ("head", "tail", "load", "store")}
    slots, groups = [], []
    for chunks, bound in regions:
        first = len(slots) // 64
        for c, chunk in enumerate(chunks):
            starts = c == 0 or chunks[c - 1][-1][2] != chunk[0][2]
            ends = c + 1 == len(chunks) or chunks[c + 1][0][2] != chunk[-1][2]
            row = chunk[0][2] % S * M + chunk[0][2] // S
            tables["head"].append(chunk[0][2] if case.states or not starts else -2)
            tables["tail"].append(chunk[-1][2] if case.states or not ends else -2)
            tables["load"].append(row if case.states and starts else -1)
            tables["store"].append(row if case.states and ends else -1)
            if not case.packed:
                if starts or groups[-1][1] - groups[-1][0] == case.group:
                    groups.append([first + c, first + c])
                groups[-1][1] += 1
            slots += chunk + [(-1, -1, -1)] * (64 - len(chunk))
        unused = bound - len(chunks)
        slots += [(-1, -1, -1)] * (64 * unused)
        for name, nothing in (("head", -2), ("tail", -2), ("load", -1), ("store", -1)):
            tables[name] += [nothing] * unused
    total = len(slots) // 64
    if case.packed:
        groups = [[c, min(c + case.group, total)] for c in range(0, total, case.group)]
    else:
        segments = (min(S, T) if case.shared else 0) + min(S * case.N, T * case.K)
        groups += [[0, 0]] * (min(total, -(-total // case.group) + segments) - len(groups))
    token, out, segment = ([slot[i] for slot in slots] for i in range(3))
    first, end = ([group[i] for group in groups] for i in range(2))
    return {
        "token": token, "out": out, "segment": segment, **tables, "group_first": first, "group_end": end,
        "num_shared_chunks": regions[0][1],
    }  # fmt: skip


def cut(rows: list) -> list[list]:
    return [rows[first : first + 64] for first in range(0, len(rows), 64)]
