"""The script reads and writes true weights, whatever happens between forward and step."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest
import torch
from harness.checks import assert_replicas_equal
from harness.job import Run, joined
from torch import nn

from dadt.train.prediction import base
from dadt.train.prediction.base import Holds, Prediction

READS = """
    import copy, io
    from harness.scenarios import backward, batch, SCENARIOS, mlp, snapshot
    from torch.optim.swa_utils import AveragedModel
    torch.manual_seed(0)
    s = SCENARIOS["momentum"]
    model = mlp(); optimizer = s.optimizer(model.parameters())
    average = AveragedModel(model)
    mean = [torch.zeros_like(p) for p in model.parameters()]
    predicted = 0
    def weights(m): return [p.detach().clone() for p in m.parameters()]
    def same(a, b): return all(torch.equal(x, y) for x, y in zip(a, b))
    def pickled(m):
        stream = io.BytesIO(); torch.save(m, stream); stream.seek(0)
        assert b"dadt" not in stream.getvalue()
        return torch.load(stream, weights_only=False)
    true = weights(model)
    ways = {
        "eval": lambda: weights(model.eval()),
        "state_dict": lambda: list(model.state_dict().values()),
        "deepcopy": lambda: weights(copy.deepcopy(model)),
        "torch.save": lambda: weights(pickled(model)),
        "child": lambda: [*true[:2], *list(model[2].state_dict().values())],
    }
    seen = set()
    for step in range(40):
        model.train()
        backward(s, model, rank, step)
        predicted += not same(weights(model), true)
        with torch.no_grad():
            before = weights(model)
            model(batch(rank, step, 0)[0])        # in the middle of a step, without gradients
            assert same(before, weights(model))
        way = list(ways)[step % len(ways)]
        assert same(ways[way](), true), way
        seen.add(way)
        optimizer.step()
        true = weights(model)
        average.update_parameters(model)
        for m, p in zip(mean, true):
            m += (p - m) / (step + 1)
        optimizer.zero_grad()
    assert predicted >= 30, predicted
    assert all(torch.allclose(m, p, atol=1e-6) for m, p in zip(mean, average.module.parameters()))
    with torch.no_grad():
        first = model(batch(0, 0, 0)[0])
    assert "_compiled_call_impl" not in copy.deepcopy(model).__dict__
    report({"state": snapshot(model, optimizer), "predicted": predicted})
"""


WRITES = """
    from harness.scenarios import backward, SCENARIOS, mlp, snapshot
    torch.manual_seed(0)
    s = SCENARIOS["momentum"]
    model = mlp(); optimizer = s.optimizer(model.parameters())
    def weights(): return [p.detach().clone() for p in model.parameters()]
    start = {k: v.clone() for k, v in model.state_dict().items()}
    own, applied = [], []
    def gradients(): return [p.grad.clone() for p in model.parameters()]
    optimizer.register_step_pre_hook(lambda *_: applied.append(gradients()) if step == 21 else None)
    for step in range(40):
        backward(s, model, rank, step)
        if step == 20:
            own = gradients()
        optimizer.step()
        optimizer.zero_grad()
        for p in model.parameters():              # WGAN's clipping
            p.data.clamp_(-0.2, 0.2)
        with torch.no_grad():                     # decay by hand
            for p in model.parameters():
                p.mul_(0.999)
        if step == 20:
            model.load_state_dict(start)
            assert all(torch.equal(a, b) for a, b in zip(weights(), start.values()))
        if step == 25:                            # a layer whose weights come late
            extra = nn.Linear(3, 3)
            nn.init.eye_(extra.weight); nn.init.zeros_(extra.bias)
            model.append(extra)
            optimizer.add_param_group({"params": extra.parameters(), "lr": 0.01})
        if step != 20 and step != 25:
            assert max(p.abs().max() for p in weights()[:4]) <= 0.2
    report({"state": snapshot(model, optimizer), "own": own, "applied": applied[0]})
"""


COMPILED = """
    import torch._dynamo, torch._dynamo.testing
    from harness.scenarios import batch, snapshot
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 3)
        def forward(self, x):
            return self.b(torch.tanh(self.a(x)))
    frames = []
    states = {}
    for how in ("torch.compile", "optimizer first", "Module.compile"):
        torch._dynamo.reset()
        torch.manual_seed(0)
        counter = torch._dynamo.testing.CompileCounter()
        model = Net()
        if how == "torch.compile":
            called = torch.compile(model, backend=counter, fullgraph=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        if how == "optimizer first":
            called = torch.compile(model, backend=counter, fullgraph=True)
        if how == "Module.compile":
            called = model
            model.compile(backend=counter, fullgraph=True)
        predicted = 0
        true = [p.detach().clone() for p in model.parameters()]
        for step in range(20):
            x, y = batch(rank, step, 0)
            nn.functional.cross_entropy(called(x), y).backward()
            predicted += any(not torch.equal(p, t) for p, t in zip(model.parameters(), true))
            optimizer.step()
            optimizer.zero_grad()
            true = [p.detach().clone() for p in model.parameters()]
        assert predicted >= 15, (how, predicted)
        assert counter.frame_count == 1, (how, counter.frame_count)
        states.update({how + k: v for k, v in snapshot(model, optimizer).items()})
    torch._dynamo.reset()
    torch.manual_seed(0)
    generator, judge = nn.Linear(6, 6), nn.Linear(6, 1)
    of_generator, of_judge = (torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9) for m in (generator, judge))
    generator, judge = (torch.compile(m, backend="aot_eager", dynamic=False) for m in (generator, judge))
    for step in range(10):
        x = batch(rank, step, 0)[0][step // 7:]         # the last ones are smaller, and compiled anew
        fake = generator(x.flip(1))
        of_judge.zero_grad()
        (judge(fake.detach()) - judge(x)).mean().backward()
        of_judge.step()
        of_generator.zero_grad()
        (-judge(fake)).mean().backward()
        of_generator.step()
    states.update({f"{m} {k}": v.clone() for m in (generator, judge) for k, v in m.state_dict().items()})
    names = list(Net().state_dict())
    for name in names:
        assert torch.equal(states["torch.compile" + name], states["Module.compile" + name])
    report({"state": states})
"""


CONTAINER = """
    from harness.scenarios import batch, mlp, snapshot
    class Trainer(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = mlp()
        def training_step(self, x, y):
            return nn.functional.cross_entropy(self.net(x), y)
    torch.manual_seed(0)
    trainer = Trainer()
    optimizer = torch.optim.SGD(trainer.parameters(), lr=0.05, momentum=0.9)
    predicted = 0
    for step in range(20):
        true = [p.detach().clone() for p in trainer.parameters()]
        trainer.training_step(*batch(rank, step, 0)).backward()
        predicted += any(not torch.equal(p, t) for p, t in zip(trainer.parameters(), true))
        optimizer.step()
        optimizer.zero_grad()
    assert predicted >= 12, predicted
    report({"state": snapshot(trainer, optimizer)})
"""


ACTOR_CRITIC = """
    from harness.scenarios import batch
    def weights(m): return torch.cat([p.detach().reshape(-1) for p in m.parameters()])
    states = {}
    for frozen in (False, True):
        torch.manual_seed(0)
        actor, critic, target = nn.Linear(6, 3), nn.Linear(9, 1), nn.Linear(9, 1)
        target.load_state_dict(critic.state_dict())
        of_actor = torch.optim.Adam(actor.parameters(), lr=0.01)
        of_critic = torch.optim.Adam(critic.parameters(), lr=0.01)
        predicted, temperature = 0, torch.ones((), requires_grad=True)
        for step in range(30):
            x, y = batch(rank, step, 0)
            true = weights(critic)
            q = critic(torch.cat([x, actor(x).detach()], 1))
            predicted += not torch.equal(weights(critic), true)
            of_critic.zero_grad()
            (q - y[:, None].float()).pow(2).mean().backward()
            of_critic.step()
            true = weights(critic)
            critic.requires_grad_(not frozen)
            of_actor.zero_grad()
            (-critic(torch.cat([x, actor(x)], 1)).mean()).backward()   # sees the critic, and steps the actor
            of_actor.step()
            critic.requires_grad_(True)
            (temperature * 2).backward()                               # of neither
            with torch.no_grad():
                assert torch.equal(weights(critic), true)
                for t, p in zip(target.parameters(), critic.parameters()):
                    t.lerp_(p, 0.1)
        assert predicted >= 20, predicted
        every = nn.ModuleList([actor, critic, target]).state_dict()
        states.update({f"{frozen} {k}": v.clone() for k, v in every.items()})
    report({"state": states})
"""


IN_BACKWARD = """
    from harness.scenarios import batch, mlp
    torch.manual_seed(0)
    model = mlp()
    first, *_, last = model.parameters()
    optimizers = {p: torch.optim.SGD([p], lr=0.05, momentum=0.9) for p in model.parameters()}
    judge = nn.Linear(3, 3)
    of_judge = torch.optim.SGD(judge.parameters(), lr=0.05, momentum=0.9)
    seen = []
    def step_one(p):
        if p is last:
            seen.append(first.detach().clone())
        optimizers[p].step()
        optimizers[p].zero_grad()
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(step_one)
    predicted = 0
    for step in range(20):
        true = first.detach().clone()
        x, y = batch(rank, step, 0)
        judged = judge.weight.detach().clone()
        loss = nn.functional.cross_entropy(judge(model(x)), y)
        ahead = first.detach().clone()
        predicted += not torch.equal(ahead, true)
        loss.backward()
        assert torch.equal(seen[-1], ahead)             # others have stepped by then
        assert torch.equal(judge.weight, judged)
        of_judge.step()
        of_judge.zero_grad()
    assert predicted >= 12, predicted
    report({"state": {k: v.clone() for k, v in nn.ModuleList([model, judge]).state_dict().items()}})
"""


ESTIMATOR = """
    from harness.scenarios import batch
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = nn.Linear(6, 6), nn.Linear(6, 3)
        def forward(self, x):
            h = self.one(x).tanh()
            of_estimator.zero_grad()
            estimator(h.detach()).pow(2).mean().backward()
            of_estimator.step()                             # in the midst of this forward
            self.seen = self.two.weight.detach().clone()
            return self.two(h)
    torch.manual_seed(0)
    model, estimator = Model(), nn.Linear(6, 1)
    of_model = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    of_estimator = torch.optim.SGD(estimator.parameters(), lr=0.05)
    predicted = 0
    for step in range(14):
        true = model.two.weight.detach().clone()
        of_model.zero_grad()
        x, y = batch(rank, step, 0)
        out = model(x)
        predicted += not torch.equal(model.seen, true)
        assert torch.equal(model.two.weight, true)
        out.register_hook(lambda gradient: back.append(model.two.weight.detach().clone()))
        back = []
        nn.functional.cross_entropy(out, y).backward()
        assert torch.equal(back[0], model.seen)
        of_model.step()
    assert predicted >= 8, predicted
    report({"state": {k: v.clone() for k, v in nn.ModuleList([model, estimator]).state_dict().items()}})
"""


LEFT_OUT = """
    from harness.scenarios import batch
    torch.manual_seed(0)
    one, other, follower = nn.Linear(6, 3), nn.Linear(3, 1), nn.Linear(3, 1)
    of_one, of_other = (torch.optim.Adam(m.parameters(), lr=0.01) for m in (one, other))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1000)
    for step in range(20):
        x, _ = batch(rank, step, 0)
        of_other.zero_grad()
        scaler.scale(other(one(x).detach()).pow(2).mean()).backward()
        scaler.step(of_other)
        of_one.zero_grad()
        scaler.scale(other(one(x)).mean() * (float("inf") if step == 10 else 1.0)).backward()
        scaler.step(of_one)
        scaler.update()
        with torch.no_grad():
            for f, p in zip(follower.parameters(), other.parameters()):
                f.lerp_(p, 0.1)
    report({"state": {k: v.clone() for k, v in nn.ModuleList([one, other, follower]).state_dict().items()}})
"""


GAN = """
    from harness.scenarios import batch
    torch.manual_seed(0)
    generator, judge = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6)), nn.Linear(6, 1)
    of_generator = torch.optim.SGD(generator.parameters(), lr=0.05, momentum=0.9)
    of_judge = torch.optim.SGD(judge.parameters(), lr=0.05, momentum=0.9)
    def weights(m): return [p.detach().clone() for p in m.parameters()]
    def same(a, b): return all(torch.equal(x, y) for x, y in zip(a, b))
    predicted = 0
    for step in range(30):
        x, _ = batch(rank, step, 0)
        true = weights(generator)
        fake = generator(x.flip(1))
        ahead = weights(generator)
        predicted += not same(ahead, true)
        of_judge.zero_grad()
        (judge(fake.detach()) - judge(x)).mean().backward()
        of_judge.step()
        assert same(weights(generator), true)          # as a script may look at them
        seen = []
        fake.register_hook(lambda gradient: seen.append(weights(generator)))   # in the midst of the backward
        of_generator.zero_grad()
        torch.autograd.grad(-judge(fake).mean(), list(generator.parameters()), retain_graph=True)
        (-judge(fake)).mean().backward()
        assert len(seen) == 2 and all(same(each, ahead) for each in seen)
        assert same(weights(generator), true)
        with torch.no_grad():
            generator(x)
        torch.func.grad(lambda v: v.pow(2).sum())(x)   # a transform takes no part in it
        assert same(weights(generator), true)
        of_generator.step()
    assert predicted >= 20, predicted
    report({"state": {k: v.clone() for k, v in nn.ModuleList([generator, judge]).state_dict().items()}})
"""


SCRIPTS = {
    "reads": READS,
    "writes": WRITES,
    "container that is never called": CONTAINER,
    "targets that follow the steps of two optimizers": ACTOR_CRITIC,
    "backward after the step of another optimizer": GAN,
    "steps in hooks of a backward": IN_BACKWARD,
    "step within a forward": ESTIMATOR,
    "step that the scaler leaves out": LEFT_OUT,
}


@pytest.fixture(scope="module")
def shared(shared_run) -> Run:
    return shared_run(joined(**SCRIPTS), "--warmup-steps", "2")


@pytest.mark.parametrize("script", SCRIPTS)
def test_what_the_script_sees(shared, script) -> None:
    assert_replicas_equal(shared.of(script))


def test_the_gradient_in_flight_comes_to_loaded_weights(shared) -> None:
    one, other = shared.of("writes").ranks
    for applied, *own in zip(one["applied"], one["own"], other["own"], strict=True):
        torch.testing.assert_close(applied, sum(own) / 2)


@pytest.mark.parametrize("viewed", [False, True])
@pytest.mark.parametrize("at", ["apply", "suspend", "undo", "resume"])
def test_true_weights_outlive_an_interruption(at: str, viewed: bool) -> None:
    """At each line they are in the parameters or in the buffers."""

    def interrupt() -> None:
        raise KeyboardInterrupt

    for line in lines(at, viewed):
        ahead, views = begun(at, viewed)
        with pytest.raises(KeyboardInterrupt):
            at_line(line, interrupt, getattr(ahead, at))
        ahead.undo()
        assert first_values(ahead) == [0.0, 1.0, 2.0, 3.0], line
        del views


@pytest.mark.parametrize("viewed", [False, True])
@pytest.mark.parametrize("at", ["apply", "suspend", "undo", "resume"])
def test_a_signal_handler_saves_and_training_goes_on(at: str, viewed: bool) -> None:
    for line in lines(at, viewed):
        ahead, views = begun(at, viewed)
        saved = []

        def save(ahead=ahead, saved=saved) -> None:
            ahead.undo()
            saved.extend(first_values(ahead))

        at_line(line, save, getattr(ahead, at))
        assert saved == [0.0, 1.0, 2.0, 3.0], line
        ahead.suspend()
        ahead.resume()
        ahead.undo()
        assert first_values(ahead) == [0.0, 1.0, 2.0, 3.0], line
        del views


def begun(at: str, viewed: bool) -> tuple[Ahead, list[torch.Tensor]]:
    """A prediction that is about to be told this. viewed: something else shows the parameters' memory, so that values
    are copied."""
    ahead = Ahead([nn.Parameter(torch.full((3,), float(i))) for i in range(4)])
    views = [p.data for p in ahead.parameters] if viewed else []
    if at != "apply":
        ahead.apply()
        assert ahead._lent == [not viewed] * 4
    if at == "resume":
        ahead.suspend()
    return ahead, views


def first_values(prediction: Prediction) -> list[float]:
    return [float(p.data[0]) for p in prediction.parameters]


def lines(at: str, viewed: bool) -> range:
    """The lines of prediction's own that are run."""
    ahead, _views = begun(at, viewed)
    return range(at_line(-1, lambda: None, getattr(ahead, at)))


def at_line(line: int, call: Callable[[], None], run: Callable[[], None]) -> int:
    """Run it, and this call before the line of prediction's own with this number. How many lines there were."""
    count = 0

    def trace(frame, event, _):
        nonlocal count
        if frame.f_code.co_filename != base.__file__:
            return None
        if event == "line":
            count += 1
            if count == line + 1:
                sys.settrace(None)
                call()
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        run()
    finally:
        sys.settrace(before)
    return count


class Ahead(Prediction):
    """Predicts that everything grows by 100."""

    needs = 1

    def __init__(self, parameters) -> None:
        super().__init__(parameters)
        self._holds = Holds.KNOWN

    def _go_ahead(self) -> bool:
        self._buffers = [p.data + 100.0 for p in self.parameters]
        return True


def test_compiled_models_have_no_break(dadt_run) -> None:
    assert_replicas_equal(dadt_run(COMPILED, "--warmup-steps", "2"))
