"""Momentum in one or two bits of Keras's optimizers on torch: their own variables, and the same on all ranks."""

from __future__ import annotations

import ast
import re

import pytest
import torch
from frontends.test_keras import DIES, HEAD, told

from dadt.frontends.keras.on_tensorflow import TensorFlowCarrier
from dadt.train.moment import unsuited

OPTIONS = "-np", "2", "--warmup-steps", "4", "--executor", "shm"
BEGINS = "from now on momentum is sent"
FITS = """
x = generator.normal(size=(1024, 64)).astype("float32")
y = (x @ generator.normal(size=(64, 8))).argmax(1)
for optimizer in {optimizers}:
    keras.utils.set_random_seed(1)
    hidden, last = keras.layers.Dense(128, activation="tanh"), keras.layers.Dense(8)
    model = compiled(keras.Sequential([keras.Input((64,)), hidden, last]), optimizer)
    losses = model.fit(x, y, batch_size=16, epochs=4, verbose=0).history["loss"]
    print(optimizer.name, "ends with", losses[0], losses[-1], digest(model.weights), digest(optimizer.variables))
"""
FITTING = {
    "adam": "keras.optimizers.Adam(4e-3, use_ema=True, ema_overwrite_frequency=9, ema_momentum=0.5, name='adam')",
    "adamw": "keras.optimizers.AdamW(4e-3, beta_2=0.95, name='adamw')",
    "nadam": "keras.optimizers.Nadam(keras.optimizers.schedules.CosineDecay(4e-3, 128), name='nadam')",
}


@pytest.mark.parametrize(
    ("algorithm", "compression", "names"),
    [
        ("sync", "momentum:1", ("adam",)),
        ("pipe", "momentum:2", ("nadam",)),
        *(
            pytest.param(algorithm, f"momentum:{bits}", tuple(FITTING), marks=pytest.mark.slow)
            for algorithm in ("pipe", "sync")
            for bits in (1, 2)
        ),
    ],
)
def test_fit_learns_as_without_compression(launch, algorithm: str, compression: str, names: tuple[str, ...]) -> None:
    script = HEAD + FITS.format(optimizers=f"[{', '.join(FITTING[name] for name in names)}]")
    plain, sent = (
        launch(script, *OPTIONS, "--algorithm", algorithm, "--compression", each, "train.py")
        for each in ("none", compression)
    )
    assert sent.err.count(BEGINS) == len(names), sent.err
    for name in names:
        ((first, want, *_),) = map(bytes.split, told(plain, f"{name} "))
        ((_, found, *_),) = map(bytes.split, told(sent, f"{name} "))  # digests included, the same on both ranks
        assert float(want) < 0.5 * float(first), name
        assert float(found) == pytest.approx(float(want), rel=0.2), name


STEADY = """
signs = torch.sign(torch.randn(32, 32))
for name in ("AdamW", "Nadam"):
    weights = keras.Variable(np.ones((32, 32), "float32"))
    optimizer = getattr(keras.optimizers, name)(1e-3, weight_decay=0.1)
    optimizer.build([weights])
    for step in range(86):
        optimizer.apply([signs * (0.03 if step > 80 else 0.01)])
    momentum = (optimizer._momentums[0].value * signs).numpy()
    values = float(momentum.min()), float(momentum.max()), float(weights.value.detach().mean())
    print(name, "ends with", *values, digest(optimizer.variables))
"""
"""One bit tells without an error what has one magnitude, and so the last steps, of gradients three times as large."""


@pytest.mark.parametrize("algorithm", ["pipe", pytest.param("sync", marks=pytest.mark.slow)])
def test_momentum_is_what_it_is_without_compression(launch, algorithm: str) -> None:
    plain, sent = (
        launch(HEAD + STEADY, *OPTIONS, "--algorithm", algorithm, "--compression", compression, "train.py")
        for compression in ("none", "momentum:1")
    )
    assert sent.err.count(BEGINS) == 2, sent.err
    for name in ("AdamW", "Nadam"):
        ((*want, _),) = map(bytes.split, told(plain, f"{name} "))
        ((*found, _),) = map(bytes.split, told(sent, f"{name} "))
        assert list(map(float, found)) == pytest.approx(list(map(float, want)), rel=0.01), name


TWINS = """
noise, found = torch.Generator().manual_seed(int(os.environ["RANK"])), {}
every = [torch.randn(64, 64, generator=noise) * (1 + (step > 90)) for step in range(120)]
for ours, theirs in {"AdamW": "AdamW", "Nadam": "NAdam"}.items():
    weights = torch.nn.Parameter(torch.ones(64, 64))
    twin = getattr(torch.optim, theirs)([weights], lr=1e-3, betas=(0.9, 0.95))
    variable = keras.Variable(np.ones((64, 64), "float32"))
    optimizer = getattr(keras.optimizers, ours)(1e-3, beta_2=0.95)
    optimizer.build([variable])
    for gradient in every:
        weights.grad = gradient.clone()
        twin.step()
        optimizer.apply([gradient.clone()])
    for of_torch, of_keras in zip(("exp_avg", "exp_avg_sq"), (optimizer._momentums, optimizer._velocities)):
        wanted, there = twin.state[weights][of_torch], of_keras[0].value.detach()
        found[ours, of_torch] = float((there - wanted).norm() / wanted.norm())
print("ends with", found)
"""
"""Gradients do not depend on weights, and so the same values must travel, but for a few that rounding changes."""


@pytest.mark.parametrize("algorithm", ["pipe", pytest.param("sync", marks=pytest.mark.slow)])
def test_momentum_and_second_moment_are_those_of_torchs_optimizers(launch, algorithm: str) -> None:
    result = launch(HEAD + TWINS, *OPTIONS, "--algorithm", algorithm, "--compression", "momentum:1", "train.py")
    assert result.err.count(BEGINS) == 4, result.err
    ((line),) = told(result)
    found = ast.literal_eval(line.decode())
    assert max(found.values()) < 0.01, found


SHARED = """
rank = int(os.environ["RANK"])
weights = keras.Variable(np.zeros((64, 64), "float32"))
optimizer = keras.optimizers.Adam(1e-6)
optimizer.build([weights])
noise = torch.Generator().manual_seed(rank)
for step in range(112):
    optimizer.apply([torch.randn(64, 64, generator=noise) * (1 + 2 * rank)])
print(f"{rank} ends with", float(optimizer._velocities[0].value.detach().mean()) / (1 - 0.999**112))
"""


@pytest.mark.slow
def test_ranks_that_step_alone_divide_by_the_same(launch) -> None:
    """The mean of the roots is 2 and its square 4; that of averages is 2.5, and that of the ranks' own 1 and 9."""
    result = launch(HEAD + SHARED, *OPTIONS[:2], "--algorithm", "local", "--warmup-steps", "20", "train.py")
    assert result.code == 0 and "stays each rank's own" not in result.err, result.err
    found = [float(value) for value in re.findall(rb"\d ends with (.*)", result.out)]
    assert found == pytest.approx([2.5, 2.5], rel=0.1)


REFUSED = {
    "SGD(0.1, momentum=0.9)": "the step of Keras's SGD is not known",
    "Mine()": "the step of Keras's Mine is not known",
    "LossScaleOptimizer(Adam())": "the step of Keras's LossScaleOptimizer is not known",
    "Adam(beta_1=0.0)": "Keras's Adam has no momentum",
    "Adam(amsgrad=True)": "Keras's Adam has amsgrad",
    "Adam(clipnorm=1.0)": "Keras's Adam clips gradients within its step",
    "AdamW(clipvalue=1.0)": "Keras's AdamW clips gradients within its step",
    "Nadam(global_clipnorm=1.0)": "Keras's Nadam clips gradients within its step",
    "AdamW(gradient_accumulation_steps=2)": "Keras's AdamW accumulates gradients within its step",
    "Adam(loss_scale_factor=2.0)": "Keras's Adam divides gradients by a loss scale within its step",
}
LINES = """
import dadt.keras as dadt
from keras.optimizers import SGD, Adam, AdamW, LossScaleOptimizer, Nadam
dadt.init()
class Mine(Adam):
    def update_step(self, gradient, variable, learning_rate):
        super().update_step(gradient * 2, variable, learning_rate)
def train(optimizer, **options):
    weights = keras.Variable(np.ones((8, 8), "float32"))
    dadt.DistributedOptimizer(optimizer, **options)
    optimizer.build([weights])
    for step in range(4):
        optimizer.apply([weights.value.detach() * (1 + dadt.rank())])
    return digest([weights, *optimizer.variables])
print("ends with", train(Adam(), reduction="sum"), *map(train, [{optimizers}]))
"""


def test_lines_name_the_optimizer_and_say_why_gradients_are_sent(launch) -> None:
    script = HEAD + LINES.format(optimizers=", ".join(REFUSED))
    result = launch(script, *OPTIONS, "--algorithm", "sync", "--compression", "momentum:1", "train.py")
    assert len(told(result)) == 1
    lines = [line for line in result.err.splitlines() if "gradients are sent in 4 bits" in line]
    for line, why in zip(lines, ["Keras's Adam gets sums of gradients", *REFUSED.values()], strict=True):
        assert line.endswith(f"gradients are sent in 4 bits, as with int4, since {why}"), line
    assert "Carrier" not in result.err and BEGINS not in result.err


def test_on_tensorflow_gradients_are_sent() -> None:
    class Adam:
        """Stands for that of Keras on TensorFlow."""

    optimizer = Adam()
    carrier = TensorFlowCarrier(optimizer, [torch.nn.Parameter(torch.ones(2))])
    assert unsuited(carrier) == "Keras's Adam keeps its state in TensorFlow"


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["pipe", "sync"])
def test_a_killed_job_goes_on_bit_for_bit(launch, algorithm: str) -> None:
    options = [*OPTIONS, "--algorithm", algorithm, "--snapshot-every", "10steps", "--compression", "momentum:1"]
    undisturbed = launch(HEAD + DIES, *options, "train.py")
    killed = launch(HEAD + DIES, *options, "train.py", DIE="58")
    assert killed.code != 0 and BEGINS in killed.err
    resumed = launch(HEAD + DIES, *options, "--resume", killed.job, "train.py")
    assert "steps replayed" in resumed.err
    assert told(resumed) == told(undisturbed)
