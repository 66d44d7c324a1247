"""What a job does not train (a frozen base, buffers, packed weights) is compared at the start, and sent only where it
differs."""

from __future__ import annotations

import pytest
import torch
from harness.checks import assert_replicas_equal
from harness.job import joined

from dadt.train import digest
from dadt.train.digest import digests
from dadt.train.frozen import Part, chosen, quantization, readable, to_send
from dadt.train.lora import trains_products

COUNTED = """
    import psutil, socket, struct
    torch.manual_seed(0)
    def sent():
        "Bytes that this process has sent over TCP connections that are open, as the kernel counts them."
        fds = {c.fd for c in psutil.Process().net_connections("tcp") if c.status == "ESTABLISHED"}
        total = 0
        for fd in fds:
            with socket.socket(fileno=os.dup(fd)) as each:
                info = each.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 232)
                total += struct.unpack_from("Q", info, 200)[0]  # tcpi_bytes_sent
        return total
    class LoRA(nn.Module):
        def __init__(self, base):
            super().__init__()
            self.base = base.requires_grad_(False)
            self.lora_A = nn.Parameter(torch.randn(4, 1024) / 32)
            self.lora_B = nn.Parameter(torch.zeros(1024, 4))
        def forward(self, x):
            return self.base(x) + x @ self.lora_A.T @ self.lora_B.T
    class Packed(nn.Module):
        "A base in 4 bits as bitsandbytes packs it, and one as GPTQ does."
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randint(0, 256, (512, 1024), dtype=torch.uint8), requires_grad=False)
            self.weight.quant_state = type("QuantState", (), {})()
            self.weight.quant_state.absmax = torch.rand(1024)
            self.register_buffer("qweight", torch.randint(-2**31, 2**31 - 1, (128, 1024), dtype=torch.int32))
            self.register_buffer("scales", torch.rand(8, 1024, dtype=torch.float16))
            self.register_buffer("eight", torch.randn(64, 64).to(torch.float8_e4m3fn).t())
            self.lora_A = nn.Parameter(torch.randn(4, 1024) / 32)
        def forward(self, x):
            return x * self.weight.quant_state.absmax + (x @ self.lora_A.T).sum()
    def state(model):
        packed = getattr(getattr(model, "weight", None), "quant_state", None)
        found = {k: v.view(torch.uint8) if k == "eight" else v for k, v in model.state_dict().items()}
        return {**found, **({} if packed is None else {"absmax": packed.absmax})}
    def trained(model, steps=2, **more):
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.01)
        begun = sent()
        for step in range(steps):
            torch.manual_seed(9 + rank + step)
            model(torch.randn(2, 1024)).pow(2).mean().backward()
            if not step:
                first = sent() - begun
            optimizer.step()
            optimizer.zero_grad()
        return {"first": first, "state": {k: v.clone() for k, v in state(model).items()}, **more}
"""
EQUAL = (
    COUNTED
    + """
    model = LoRA(nn.Linear(1024, 1024))
    before = {k: v.clone() for k, v in model.state_dict().items() if "base" in k}
    report(trained(model, before=before))
"""
)
DIFFERS = (
    COUNTED
    + """
    model = LoRA(nn.Linear(1024, 1024))
    if rank:
        with torch.no_grad():
            model.base.bias[7] += 1.0
    report(trained(model))
"""
)
PACKED = (
    COUNTED
    + """
    model = Packed()
    report(trained(model))
"""
)
PACKED_DIFFERS = (
    COUNTED
    + """
    torch.manual_seed(3 + rank)
    model = Packed()
    report(trained(model))
"""
)
TIED = (
    COUNTED
    + """
    model = LoRA(nn.Linear(1024, 1024))
    model.head = nn.Linear(1024, 1024, bias=False)
    model.head.weight = model.base.weight
    report(trained(model))
"""
)
SHAPES = (
    COUNTED
    + """
    class Scaled(nn.Module):
        "IA3, which trains a factor for each feature, and prompt tuning, which trains vectors before the text."
        def __init__(self):
            super().__init__()
            self.base = nn.Linear(1024, 1024).requires_grad_(False)
            self.ia3_l = nn.Parameter(torch.ones(1024))
            self.prompt_embeddings = nn.Embedding(4, 1024)
        def forward(self, x):
            return self.base(torch.cat([self.prompt_embeddings.weight, x])) * self.ia3_l
    report(trained(Scaled()))
"""
)
THAWED = (
    COUNTED
    + """
    class Layers(nn.Module):
        def __init__(self):
            super().__init__()
            self.base = nn.Linear(1024, 1024)
            self.later = nn.Linear(1024, 8)
            self.head = nn.Linear(8, 1)
        def forward(self, x):
            return self.head(self.later(self.base(x)))
    model = Layers()
    model.base.requires_grad_(False)
    model.later.requires_grad_(False)
    if rank:
        with torch.no_grad():
            model.later.weight.add_(1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    before, begun = model.later.weight.detach().clone(), sent()
    moved, travelled = [], []
    for step in range(12):
        if step == 4:
            model.later.requires_grad_(True)
        if step == 7:
            model.base.requires_grad_(True)
        optimizer.zero_grad()
        torch.manual_seed(9 + 2 * step + rank)
        model(torch.randn(4, 1024)).pow(2).mean().backward()
        optimizer.step()
        moved.append([(before != model.later.weight).any().item(), model.base.weight.detach().sum().item()])
        travelled.append(sent() - begun)
    state = {k: v.clone() for k, v in model.state_dict().items()}
    report({"state": state, "moved": moved, "sent": travelled})
"""
)
APART = """
    import gc
    def train(names, frozen=()):
        model = nn.Module()
        for name in names:
            part = model
            *parents, last = name.split(".")
            for parent in parents:
                if not hasattr(part, parent):
                    part.add_module(parent, nn.Module())
                part = getattr(part, parent)
            setattr(part, last, nn.Linear(4, 4, bias=False).requires_grad_(name not in frozen))
        layers = [m for m in model.modules() if isinstance(m, nn.Linear)]
        model.forward = lambda x: sum(m(x) for m in layers)
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.01)
        for step in range(6):
            optimizer.zero_grad()
            model(torch.randn(2, 4)).pow(2).mean().backward()
            optimizer.step()
        del optimizer
        gc.collect()
    pair = ["q.lora_A.default", "q.lora_B.default"]
    train(pair)
    train(pair, frozen=pair[:1])
    train(["base", "q.lora_A.default"])
    report({"state": {}})
"""
APART_BYTES = (
    COUNTED
    + """
    model = LoRA(nn.Linear(1024, 1024))
    later = nn.Linear(1024, 4)
    model.later = later.requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    begun = sent()
    for step in range(30):
        if step == 20:
            later.requires_grad_(True)
        torch.manual_seed(9 + rank + step)
        (model(torch.randn(2, 1024)).pow(2).mean() + later(torch.randn(2, 1024)).pow(2).mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
    report({"sent": sent() - begun})
"""
)
BASE = 4 * 1024 * 1024
"""Bytes of the frozen matrix."""
TRAINED = 2 * 4 * 4 * 1024


@pytest.fixture(scope="module")
def run(shared_run):
    scripts = joined(
        equal=EQUAL, differs=DIFFERS, packed=PACKED, packed_differs=PACKED_DIFFERS, tied=TIED, shapes=SHAPES
    )
    return shared_run(scripts, "--algorithm", "pipe", "--executor", "tcp")


def test_a_frozen_base_that_all_ranks_have_is_not_sent(run) -> None:
    """Beside it, a few hundred bytes of every layer travel, and what is trained."""
    equal = run.of("equal")
    assert_replicas_equal(equal)
    assert equal.ranks[0]["first"] < TRAINED + BASE / 50
    for name, value in equal.ranks[0]["before"].items():
        assert torch.equal(value, equal.ranks[0]["state"][name])
    assert "dadt: 4.2 MB that are not trained are equal on all ranks, so they are not sent" in run.lines()


def test_what_differs_is_sent_and_nothing_else(run) -> None:
    """One value of a bias: the bias travels, the matrix does not."""
    differs = run.of("differs")
    assert_replicas_equal(differs)
    assert differs.ranks[0]["first"] < TRAINED + BASE / 50
    assert torch.equal(differs.ranks[1]["state"]["base.bias"], run.of("equal").ranks[0]["state"]["base.bias"])


def test_packed_weights_are_compared_with_their_scales(run) -> None:
    packed, differs = run.of("packed"), run.of("packed_differs")
    for found in (packed, differs):
        assert_replicas_equal(found)
    size = 512 * 1024 + 128 * 1024 * 4 + 8 * 1024 * 2
    assert packed.ranks[0]["first"] < TRAINED + size / 50
    assert differs.ranks[0]["first"] > size
    assert not torch.equal(packed.ranks[0]["state"]["absmax"], differs.ranks[0]["state"]["absmax"])


def test_a_tied_matrix_counts_once(run) -> None:
    tied = run.of("tied")
    assert_replicas_equal(tied)
    assert tied.ranks[0]["first"] < TRAINED + BASE / 50
    assert any(line.startswith("dadt: 4.2 MB that are not trained of optimizer #5 are") for line in run.lines())


def test_other_adapters_travel_alone(run) -> None:
    shapes = run.of("shapes")
    assert_replicas_equal(shapes)
    assert shapes.ranks[0]["first"] < 5 * 4 * 1024 + BASE / 50


@pytest.mark.parametrize("algorithm", ["pipe", pytest.param("sync", marks=pytest.mark.slow)])
def test_layers_that_are_thawed_later_are_averaged_from_then_on(dadt_run, algorithm: str) -> None:
    """One was equal on all ranks from the beginning, one has been made so at the start. Neither travels before."""
    options = "--algorithm", algorithm, "--warmup-steps", "2", "--verify-every", "1", "--executor", "tcp"
    run = dadt_run(THAWED, *options)
    assert_replicas_equal(run)
    first, second = (rank["moved"] for rank in run.ranks)
    assert first[-1] == second[-1]
    assert [moved for moved, _ in first[:4]] == [False] * 4 and first[7][0]
    assert len({base for _, base in first[:7]}) == 1 and first[-1][1] != first[0][1]
    assert "differs from that" not in run.output
    for rank in run.ranks:
        assert rank["sent"][6] < BASE / 20, "seven steps without the base"
        assert rank["sent"][-1] > 3 * BASE, "and five with its gradients"


@pytest.mark.parametrize(
    "options", [["local", "--sync-every", "2", "--warmup-steps", "2"], pytest.param(["gossip"], marks=pytest.mark.slow)]
)
def test_products_of_factors_that_are_averaged_apart_are_told_of(dadt_run, options: list[str]) -> None:
    """Of both factors, not of one whose other is frozen, nor of one alone."""
    run = dadt_run(APART, "--algorithm", *options)
    told = [line for line in run.lines() if "LoRA" in line]
    assert len(told) == 1 and told[0].startswith("dadt: LoRA: ranks that train apart average A and B each by itself")
    assert "averages gradients, of 32 bytes a step" in told[0]


@pytest.mark.parametrize("options", [["gossip"], ["local", "--sync-every", "4", "--warmup-steps", "2"]])
def test_a_frozen_base_is_not_averaged_where_ranks_train_apart(dadt_run, options: list[str]) -> None:
    """Though the optimizer lists it. Thirty steps send less than it would take once."""
    run = dadt_run(APART_BYTES, "--algorithm", *options, "--executor", "tcp")
    assert all(rank["sent"] < BASE for rank in run.ranks)
    assert "left out" not in run.output


def test_factors_are_known_by_the_names_of_peft() -> None:
    peft = "base_model.model.layers.0.q_proj.lora_{}.default.weight"
    assert trains_products([peft.format("A"), peft.format("B")])
    assert trains_products(["lora_embedding_A", "lora_embedding_B"])
    assert not trains_products([peft.format("A"), "other.lora_B.default.weight", "lora_Alpha", "lora_B"])


@pytest.mark.parametrize("count", [1, 7, 8, 9, 524_288, 524_289, 1_600_011])
def test_a_digest_tells_every_byte(count: int) -> None:
    values = torch.randint(0, 255, (count,), dtype=torch.uint8, generator=torch.Generator().manual_seed(count))
    (before,) = digests([values])
    for place in {0, count // 2, count - 1}:
        other = values.clone()
        other[place] += 1
        assert digests([other]) != [before]
    assert digests([values.clone()]) == [before]
    aside = torch.cat([values.new_zeros(3), values])[3:]
    assert digests([aside]) == [before], "of memory at an odd address"


def test_a_digest_tells_order_signs_shape_and_dtype() -> None:
    values = torch.ones(64, 64, dtype=torch.float64)
    values[3, 5], values[60, 1] = 2.0, -4.0
    turned, negated = values.clone(), values.clone()
    turned[3, 5], turned[60, 1] = -4.0, 2.0
    negated[[7, 9], 11] *= -1  # the highest bit of two of its integers
    each = [values, turned, negated, values.view(32, 128), values.view(torch.int64), values.t()]
    assert len(set(digests(each))) == len(each)
    assert digests([values.t()]) == digests([values.t().contiguous()])
    kinds = [torch.bool, torch.bfloat16, torch.complex64, torch.float8_e4m3fn, torch.int8]
    assert len(set(digests(torch.zeros(5, 3).to(kind) for kind in kinds))) == len(kinds)


def test_every_device_adds_up_the_same_rows() -> None:
    """A GPU adds up many at once, a CPU one after the other."""
    numbers = torch.randint(-(2**62), 2**62, (digest._ROW * 3 + 17,), generator=torch.Generator().manual_seed(1))
    weights = digest._weights(numbers.device)
    one_by_one = [digest._sums_of_rows(row, weights) for row in numbers.split(digest._ROW)]
    assert torch.equal(digest._sums_of_rows(numbers, weights), torch.cat(one_by_one))


def test_the_decision_is_the_same_on_all_ranks() -> None:
    """Trained tensors travel, and of the others what any rank has otherwise; models that differ are sent as a whole,
    which the broadcast finds."""
    ours = [None, 1, 2, 3]
    assert to_send(ours, [[None, 1, 2, 3]]) == [True, False, False, False]
    assert to_send(ours, [[None, 1, 2, 3], [None, 1, None, 4]]) == [True, False, True, True]
    assert to_send(ours, [[None, 1]]) == [True] * 4
    parts = [
        Part("weights", [torch.zeros(1)], [torch.zeros(1)]),
        Part("buffers", *[[torch.ones(k) for k in (1, 2)]] * 2),
    ]
    assert [[len(value) for value in part.values] for part in chosen(parts, [False, False, True])] == [[], [2]]
    assert [readable(count) for count in (12, 4_198_400, 13_476_839_424)] == ["12 bytes", "4.2 MB", "13.5 GB"]


def test_only_packed_weights_bring_their_attributes() -> None:
    """A trained weight's attributes may be each rank's own."""
    packed = torch.nn.Parameter(torch.zeros(4, dtype=torch.uint8), requires_grad=False)
    plain = torch.nn.Parameter(torch.zeros(4))
    packed.CB, packed.module, packed.SCB = packed.data, torch.nn.Linear(2, 2), torch.ones(2)
    plain.main_grad = torch.ones(4)
    assert [id(t) for t in quantization([packed, plain])] == [id(packed.SCB)]
