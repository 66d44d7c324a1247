"""The script reads and writes true weights, whatever happens between forward and step."""

from __future__ import annotations

import pytest
from checks import assert_equal
from job import Run, joined


def assert_replicas_equal(run) -> None:
    for other in run.ranks[1:]:
        assert_equal(run.ranks[0]["state"], other["state"], "replicas")


READS = """
    import copy, io
    from scenarios import backward, batch, SCENARIOS, mlp, snapshot
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
    from scenarios import backward, SCENARIOS, mlp, snapshot
    torch.manual_seed(0)
    s = SCENARIOS["momentum"]
    model = mlp(); optimizer = s.optimizer(model.parameters())
    def weights(): return [p.detach().clone() for p in model.parameters()]
    start = {k: v.clone() for k, v in model.state_dict().items()}
    for step in range(40):
        backward(s, model, rank, step)
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
    report({"state": snapshot(model, optimizer)})
"""


COMPILED = """
    import torch._dynamo, torch._dynamo.testing
    from scenarios import batch, snapshot
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
    names = list(Net().state_dict())
    for name in names:
        assert torch.equal(states["torch.compile" + name], states["Module.compile" + name])
    report({"state": states})
"""


CONTAINER = """
    from scenarios import batch, mlp, snapshot
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
    from scenarios import batch, snapshot
    def weights(m): return torch.cat([p.detach().reshape(-1) for p in m.parameters()])
    states = {}
    for frozen in (False, True):
        torch.manual_seed(0)
        actor, critic, target = nn.Linear(6, 3), nn.Linear(9, 1), nn.Linear(9, 1)
        target.load_state_dict(critic.state_dict())
        of_actor = torch.optim.Adam(actor.parameters(), lr=0.01)
        of_critic = torch.optim.Adam(critic.parameters(), lr=0.01)
        predicted = 0
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
            with torch.no_grad():
                assert torch.equal(weights(critic), true)
                for t, p in zip(target.parameters(), critic.parameters()):
                    t.lerp_(p, 0.1)
        assert predicted >= 20, predicted
        for name, model in {"actor": actor, "critic": critic, "target": target}.items():
            states.update({f"{name} {frozen} {k}": v.clone() for k, v in model.state_dict().items()})
    report({"state": states})
"""


GAN = """
    from scenarios import batch, snapshot
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
        of_generator.zero_grad()
        torch.autograd.grad(-judge(fake).mean(), list(generator.parameters()), retain_graph=True)
        assert same(weights(generator), ahead)         # through what the forward saw
        (-judge(fake)).mean().backward()
        assert same(weights(generator), ahead)
        of_generator.step()
    assert predicted >= 20, predicted
    states = {f"{m} {k}": v for m in (generator, judge) for k, v in m.state_dict().items()}
    report({"state": {str(i): v.clone() for i, v in enumerate(states.values())}})
"""


@pytest.fixture(scope="module")
def shared(shared_run) -> Run:
    scripts = joined(reads=READS, writes=WRITES, container=CONTAINER, actor_critic=ACTOR_CRITIC, gan=GAN)
    return shared_run(scripts, "--warmup-steps", "2")


def test_what_the_script_reads(shared) -> None:
    assert_replicas_equal(shared.of("reads"))


def test_what_the_script_writes(shared) -> None:
    assert_replicas_equal(shared.of("writes"))


def test_a_container_that_is_never_called(shared) -> None:
    assert_replicas_equal(shared.of("container"))


def test_target_networks_after_the_steps_of_two_optimizers(shared) -> None:
    assert_replicas_equal(shared.of("actor_critic"))


def test_a_backward_after_the_step_of_another_optimizer(shared) -> None:
    assert_replicas_equal(shared.of("gan"))


def test_compiled_models_have_no_break(dadt_run) -> None:
    assert_replicas_equal(dadt_run(COMPILED, "--warmup-steps", "2"))
