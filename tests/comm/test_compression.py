"""Compression: what one rounding may change, that what is lost comes later, and the same bits on all ranks."""

from __future__ import annotations

import math

import pytest
import torch
from harness.compression_rank import main
from harness.ranks import printed

from dadt import _core
from dadt.comm.bucket import Bucket
from dadt.comm.compression import CODECS as OF_GRADIENTS
from dadt.comm.compression import OF_MOMENTUM, Feedback, LowRank, forms
from dadt.comm.compression.base import in_blocks
from dadt.comm.compression.powersgd import orthonormal
from dadt.config import Config
from dadt.errors import ConfigError

CODECS = {**OF_GRADIENTS, **OF_MOMENTUM}
HALF_STEP = {"bf16": 2**-8, "fp16": 2**-11}
"""Relative to the value, but for the subnormal ones of fp16."""
LARGEST = {"int8": 127, "int4": 7}
"""Integer as which the largest magnitude of a block is sent."""


def coded(codec, values, owed=None, keep=1.0):
    """What comes back, and the wire."""
    blocks = -(-len(values) // _core.BLOCK)
    wire = torch.full((blocks * codec.core.block_bytes,), 99, dtype=torch.uint8)
    back = torch.full_like(values, 99.0)
    address = 0 if owed is None else owed.data_ptr()
    _core.compress(codec.core, values.data_ptr(), len(values), wire.data_ptr(), address, keep)
    _core.decompress(codec.core, wire.data_ptr(), back.data_ptr(), len(values))
    return back, wire.view(blocks, codec.core.block_bytes)


def padded(values):
    return in_blocks(values, -(-len(values) // _core.BLOCK))


def normal(count, seed=0):
    return torch.randn(count, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", OF_GRADIENTS)
@pytest.mark.parametrize("count", [0, 1, 255, 256, 257, 1000])
def test_each_value_is_rounded_to_nearest(name, count):
    values = normal(count) * torch.logspace(-3, 3, count)
    back, _ = coded(CODECS[name], values)
    if name in LARGEST:
        most = padded(values).abs().amax(1, keepdim=True).expand(-1, _core.BLOCK).reshape(-1)[:count]
        bound = most / (2 * LARGEST[name])
    else:
        bound = values.abs() * HALF_STEP[name] + 2**-25
    assert ((back - values).abs() <= bound * 1.0001).all()


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("scale", [1.0, 1e-38, 1e-30, 1e4, 1e30, 1e38])
def test_the_core_and_torch_give_the_same_bits(name, scale):
    values = normal(3000) * scale
    values[0], values[300], values[600], values[900:1200] = torch.inf, -torch.inf, torch.nan, 0.0
    codec = CODECS[name]
    back, wire = coded(codec, values)
    if name in (*LARGEST, *OF_MOMENTUM):  # of what is no number, the scale alone
        assert torch.equal(codec.encode(padded(values))[3:], wire[3:])
    else:
        finite = padded(values).isfinite().all(1)
        assert torch.equal(codec.encode(padded(values))[finite], wire[finite])
    again = codec.decode(wire).view(-1)[: len(values)]
    assert torch.equal(back.nan_to_num(1.0, 2.0, 3.0), again.nan_to_num(1.0, 2.0, 3.0))


@pytest.mark.parametrize("name", CODECS)
def test_finite_numbers_stay_finite_and_others_do_not(name):
    most = torch.finfo(torch.float32).max
    back, _ = coded(CODECS[name], torch.tensor([most, -most, 70000.0, 1e-45]))
    assert back.isfinite().all()
    for bad in (torch.inf, -torch.inf, torch.nan):
        back, _ = coded(CODECS[name], torch.cat([torch.tensor([bad]), normal(600)]))
        assert not back[0].isfinite()
        assert back[256:].isfinite().all()


@pytest.mark.parametrize("name", CODECS)
def test_what_is_owed_is_what_was_lost(name):
    codec, values, owed = CODECS[name], normal(700), torch.zeros(700)
    back, _ = coded(codec, values, owed)
    assert torch.equal(owed, values - back) and bool(owed.any())
    before = owed.clone()
    back, _ = coded(codec, values, owed, keep=2.0)
    assert torch.allclose(owed, values + 2 * before - back, atol=1e-6)
    before, values[3] = owed.clone(), torch.nan
    coded(codec, values, owed)
    assert owed.isfinite().all(), "poisoned"
    assert owed[3] == before[3]
    coded(codec, normal(700), owed, keep=0.0)
    fresh = torch.zeros(700)
    coded(codec, normal(700), fresh)
    assert torch.equal(owed, fresh)


@pytest.mark.parametrize("name", LARGEST)
def test_a_small_value_beside_great_ones_arrives_in_time(name):
    values, owed, sums = torch.full((256,), 1e-3), torch.zeros(256), torch.zeros(256)
    values[0] = 1.0
    for _ in range(100):
        sums += coded(CODECS[name], values, owed)[0]
    assert (sums[1:] - 0.1).abs().max() < 1 / LARGEST[name]
    assert coded(CODECS[name], values)[0][1] == 0


@pytest.mark.parametrize(
    ("executor", "hosts"),
    [
        ("shm", "00"),
        ("tcp", "012"),
        ("gloo", "012"),
        ("hierarchical:tcp", "0011"),
        pytest.param("hierarchical:gloo", "0011", marks=pytest.mark.slow),
        ("nccl's way", "000"),
    ],
)
def test_means_are_near_and_the_same_on_all_ranks(executor, hosts, tmp_path):
    ranks = printed(tmp_path, main, *((executor, hosts, rank, str(tmp_path)) for rank in range(len(hosts))))
    said = [rank.said for rank in ranks]
    words = [text.split() for text in said]
    assert all(text.startswith("right ") for text in said), said
    assert len({digest for _, digest, _ in words}) == 1, said
    assert all(float(less) > 1.5 for *_, less in words), said


def test_nothing_but_a_mean_or_sum_of_floats_is_compressed():
    engine = _core.Engine(_core.NullExecutor(0, 1), 0, 1, 5.0)
    values = torch.ones(4)
    feedback = Feedback(CODECS["int8"])
    for dtype, reduction in ((_core.DType.int32, _core.Reduction.mean), (_core.DType.float32, _core.Reduction.max)):
        layout = _core.Layout(dtype, [4])
        with pytest.raises(ValueError, match="only a mean or a sum of floats is compressed"):
            addresses = [values.data_ptr()]
            engine.allreduce(layout, addresses, addresses, "no", reduction=reduction, **feedback.arguments(4))
    engine.close(5.0)


def test_names():
    for name in (*CODECS, "none", "powersgd:4"):  # with pipe
        assert Config(compression=name).compression == name
    for name in ("", "int3", "powersgd", "powersgd:0", "powersgd:x", "int8:2", "momentum:3"):
        with pytest.raises(ConfigError, match=r"--compression .*: unknown; choose one of none, bf16, fp16, int8, int4"):
            Config(compression=name)
    buckets = [Bucket([torch.zeros(8, 8)]), Bucket([torch.zeros(8, dtype=torch.bfloat16)])]
    buckets += [Bucket([torch.zeros(8, dtype=torch.complex64)])]
    kinds = [[type(form).__name__ for form in forms(name, buckets)] for name in ("none", "int8", "powersgd:2")]
    assert kinds == [["NoneType"] * 3, ["Feedback", "Feedback", "NoneType"], ["LowRank", "NoneType", "NoneType"]]
    with pytest.raises(ConfigError, match="--compression momentum:1: the ranks of --algorithm local exchange weights"):
        Config(compression="momentum:1", algorithm="local")
    # What has 16 bits is not made other 16.
    assert [type(form).__name__ for form in forms("fp16", buckets)] == ["Feedback", "NoneType", "NoneType"]


@pytest.mark.parametrize(("name", "far"), [("momentum:1", 0.603), ("momentum:2", 0.343)])
@pytest.mark.parametrize("count", [100, 2560])
def test_one_or_two_bits_lose_what_they_must(name, far, count):
    """Relative to normal values, also where a block is not full: sqrt(1 - 2/pi), and what Lloyd and Max found."""
    values = normal(count)
    back, wire = coded(CODECS[name], values)
    assert len(wire[0]) == 4 + 32 * int(name[-1])
    assert float((back - values).norm() / values.norm()) == pytest.approx(far, rel=0.1)
    assert ((back < 0) == (values < 0)).all()


# PowerSGD ---------------------------------------------------------------------------------------------------------


def averaged(form, rank_gradients, turn=0, counts=(True, True)):
    """One exchange of ranks whose forms are given, by hand: the averages that each of them delivers."""
    rounds = [f.begin(g, None, turn, c) for f, g, c in zip(form, rank_gradients, counts, strict=True)]
    for which in ("first", "second"):
        if which == "second":
            for r in rounds:
                r.halfway()
        staged = [r.staged if which == "first" else r.then for r in rounds]
        buckets = [getattr(f, which) for f in form]
        for i in range(len(staged[0].values)):
            present = [s.values[i] for s, c in zip(staged, counts, strict=True) if c and s.values[i] is not None]
            mean = sum(present) / sum(counts) if present else torch.zeros_like(buckets[0].views[turn][i])
            mean = mean.clone()
            for bucket in buckets:
                bucket.views[turn][i].copy_(mean)
    for r in rounds:
        r.finish()
        r.learn()
    return [[view.clone() for view in f.bucket.views[turn]] for f in form]


def test_orthonormal():
    matrix = normal(40).view(10, 4)
    basis = orthonormal(matrix)
    assert torch.allclose(basis.T @ basis, torch.eye(4), atol=1e-6)
    matrix[:, 2] = 3 * matrix[:, 0] - matrix[:, 1]  # depends on those before
    basis = orthonormal(matrix)
    assert not basis[:, 2].any()
    assert torch.allclose(basis.T @ basis, torch.diag(torch.tensor([1.0, 1.0, 0.0, 1.0])), atol=1e-5)
    assert not orthonormal(torch.zeros(5, 2)).any()


def test_powersgd_sends_matrices_of_low_rank_exactly_and_vectors_as_they_are():
    template = [torch.zeros(12, 4, 5), torch.zeros(7), torch.zeros(3, 2), torch.zeros(0, 4)]
    form = [LowRank(Bucket(template), 2) for _ in range(2)]
    assert form[0].matrices == [0]  # of 3 x 2, rank 2 is no less
    left, right = normal(24, 1).view(12, 2), normal(40, 2).view(2, 20)
    gradients = [
        [(left @ right).view(12, 4, 5) * k, normal(7, k), normal(6, k).view(3, 2), template[3]] for k in (1, 3)
    ]
    for _ in range(3):
        delivered = averaged(form, gradients)
    want = [sum(pair) / 2 for pair in zip(*gradients, strict=True)]
    for got in delivered:
        assert all(torch.allclose(g, w, atol=1e-4) for g, w in zip(got, want, strict=True))
    assert all(torch.equal(*pair) for pair in zip(*delivered, strict=True))


def test_powersgd_delivers_in_the_end_what_it_has_lost():
    form = [LowRank(Bucket([torch.zeros(16, 24)]), 1) for _ in range(2)]
    gradients = [[normal(16 * 24, k).view(16, 24)] for k in range(2)]
    true = (gradients[0][0] + gradients[1][0]) / 2
    sums, errors = torch.zeros(16, 24), []
    for step in range(1, 201):
        sums += averaged(form, gradients)[0][0]
        errors.append(float((sums / step - true).norm() / true.norm()))
    assert errors[0] > 0.7 and errors[-1] < 0.15
    owed = sum(f.owed[0] for f in form) / 2
    assert torch.allclose(sums + owed, 200 * true, atol=1e-2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_powersgd_of_16_bits_computes_in_32(dtype):
    template = [torch.zeros(16, 24, dtype=dtype), torch.zeros(7, dtype=dtype)]
    form = [LowRank(Bucket(template), 1) for _ in range(2)]
    assert form[0].first.dtype == form[0].bases[0].dtype == torch.float32
    gradients = [[normal(16 * 24, k).view(16, 24).to(dtype), normal(7, k).to(dtype)] for k in range(2)]
    true = [sum(g.float() for g in pair) / 2 for pair in zip(*gradients, strict=True)]
    sums = torch.zeros(16, 24)
    for _ in range(200):
        (matrix, vector), other = averaged(form, gradients)
        assert matrix.dtype == vector.dtype == dtype and torch.equal(matrix, other[0])
        assert torch.equal(vector, true[1].to(dtype)), "rounded more than once"
        sums += matrix.float()
    owed = sum(f.owed[0] for f in form) / 2
    # Each step's average is rounded to the gradients' dtype; the rest comes later.
    bound = torch.finfo(dtype).eps * float(sums.abs().max())
    assert (sums + owed - 200 * true[0]).abs().max() < bound + 1e-2
    assert (sums / 200 - true[0]).norm() < 0.15 * true[0].norm()
    great = [[normal(16 * 24, 3).view(16, 24).sign().mul(3e4).to(dtype), template[1]]] * 2
    found = [averaged(form, great)[0][0] for _ in range(20)]
    assert all(matrix.isfinite().all() for matrix in found), "what comes later may be more than 16 bits hold"
    assert dtype == torch.bfloat16 or max(matrix.abs().max() for matrix in found) == torch.finfo(dtype).max


def test_powersgd_is_not_for_buckets_that_it_would_make_larger():
    def matrices(*shapes):
        return LowRank(Bucket([torch.zeros(shape, dtype=torch.bfloat16) for shape in shapes]), 2).matrices

    assert matrices((16, 24), (30,)) == [0]
    assert matrices((8, 8), (16, 24)) == [1], "of 8 x 8, twice 2 (8 + 8) values are no less"
    assert matrices((16, 24), (1000,)) == [], "the vector would take twice the bytes"


def test_powersgd_outlives_what_is_no_number_and_zeros():
    form = [LowRank(Bucket([torch.zeros(16, 24)]), 2) for _ in range(2)]
    good = [[normal(16 * 24, k).view(16, 24)] for k in range(2)]
    averaged(form, good)
    bad = [[good[0][0].clone()], good[1]]
    bad[0][0][2, 3] = torch.inf
    assert not averaged(form, bad)[1][0].isfinite().any()
    assert all(f.owed[0].isfinite().all() and f.bases[0].isfinite().all() for f in form)
    zeros = [[torch.zeros(16, 24)], [None]]
    for _ in range(200):
        averaged(form, zeros)
    assert all(f.bases[0].any(0).all() for f in form), "it would send zeros for ever"
    for f in form:
        f.forget()
    fresh = [LowRank(Bucket([torch.zeros(16, 24)]), 2) for _ in range(2)]
    assert torch.equal(averaged(form, good)[0][0], averaged(fresh, good)[1][0])


def test_powersgd_owes_the_same_after_a_step_that_does_not_count_or_has_no_gradient():
    form = [LowRank(Bucket([torch.zeros(16, 24)]), 2) for _ in range(2)]
    good = [[normal(16 * 24, k).view(16, 24)] for k in range(2)]
    averaged(form, good)
    owed = form[1].owed[0].clone()
    averaged(form, [good[0], [torch.full((16, 24), torch.nan)]], counts=(True, False))
    averaged(form, [good[0], [None]])
    assert torch.equal(form[1].owed[0], owed)
    form[1].forget()
    averaged(form, [good[0], [None]])
    assert form[1].owed[0] is None, "it comes back"


def test_the_loss_scale_scales_what_is_owed():
    feedback = Feedback(CODECS["int8"])
    scales = [None, torch.tensor(4.0), torch.tensor(4.0), torch.tensor(2.0), torch.tensor(2.0), None]
    assert [feedback.keep(scale) for scale in scales] == [1.0, 4.0, 1.0, 0.5, 1.0, 0.5]
    feedback.forget()
    assert feedback.keep(torch.tensor(math.pi)) == 0.0
    assert feedback.keep(torch.tensor(math.pi)) == 1.0
