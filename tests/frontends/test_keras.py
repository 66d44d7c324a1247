"""Keras on torch, in scripts that say nothing of DADT."""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from harness import forkserver
from harness.patience import PATIENCE
from harness.run import Result, Run

HEAD = """
import hashlib, os, sys
os.environ["KERAS_BACKEND"] = "torch"
import keras, numpy as np, torch
torch.set_num_threads(1)
keras.utils.set_random_seed(1)
generator = np.random.default_rng(0)
x = generator.normal(size=(128, 8)).astype("float32")
y = (x @ generator.normal(size=(8, 3))).argmax(1)

def build(*layers):
    first, last = keras.layers.Dense(16, activation="tanh"), keras.layers.Dense(3)
    return keras.Sequential([keras.Input((8,)), first, *layers, last])

def compiled(model, optimizer):
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=optimizer, loss=loss, metrics=["accuracy"])
    return model

def digest(variables):
    return hashlib.sha256(b"".join(keras.ops.convert_to_numpy(v).tobytes() for v in variables)).hexdigest()
"""
FIT = """
model = compiled(build(keras.layers.BatchNormalization(), keras.layers.Dropout(0.1)), keras.optimizers.Adam(0.01))
history = model.fit(x, y, batch_size=8, epochs=4, verbose=2, validation_data=(x[:50], y[:50]))
print("ends with", digest(model.trainable_variables), digest(v for v in model.non_trainable_variables if v.ndim),
      repr(history.history), repr(model.evaluate(x[:50], y[:50], verbose=2)))
"""


SAID = """
class Counting(keras.Model):
    def __init__(self):
        super().__init__()
        self.seen = self.add_weight(shape=(2,), trainable=False)
    def train_step(self, data):
        self.seen.assign(self.seen + len(data[0]) * (1 + int(os.environ["RANK"])))
        return {"loss": 0.0}
    def call(self, x):
        return x
counting = Counting()
counting.compile()
counting.fit(x, y, batch_size=8, epochs=1, verbose=0)
rate = keras.optimizers.schedules.CosineDecay(0.1, 32)
model = compiled(build(), keras.optimizers.SGD(rate))
for again in range(2):
    model.fit(x, y, batch_size=8, epochs=1, verbose=0)
print("later ends with", digest([counting.seen, *model.weights]))
"""


def told(result: Result, when: str = "") -> set[bytes]:
    """What ranks print at their ends: each the same. when: "later " for what comes after another training."""
    assert result.code == 0, result.err
    lines = re.findall(rf"^\[\d\] {when}ends with (.*)$".encode(), result.out, re.MULTILINE)
    assert len(lines) == 2, result.out
    return set(lines)


@pytest.mark.sample(1)
@pytest.mark.parametrize("algorithm", ["pipe", "sync"])
def test_fit_and_what_is_said(launch, algorithm: str) -> None:
    result = launch(HEAD + FIT + SAID, "-np", "2", "--algorithm", algorithm, "--warmup-steps", "5", "train.py")
    assert len(told(result)) == len(told(result, "later ")) == 1
    assert "(128 samples, shuffled): trains, 64 per worker" in result.err
    assert "(50 samples): evaluates, all of it" in result.err
    assert "equal inputs" not in result.err and "without prediction" not in result.err
    assert ("48 steps, none delayed" if algorithm == "sync" else "48 steps, 38 of them delayed") in result.err
    assert result.out.count(b"Epoch 4/4") == 1
    assert b"8/8 - " in result.out
    assert result.err.count("CosineDecay counts the steps of a worker") == 1


def test_schedules_that_dadt_cannot_scale_are_refused(launch) -> None:
    refused = launch(HEAD + SAID, "-np", "2", "--scale-lr", "linear", "train.py")
    assert refused.code == 2
    assert "multiply them by 2 in the script" in refused.err and "Traceback" not in refused.err


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("batch", ["per-rank", "global"])
def test_two_workers_take_the_steps_of_one(launch, tmp_path: Path, batch: str) -> None:
    text = """
model = compiled(build(), keras.optimizers.SGD(0.1, momentum=0.9, clipnorm=0.5))
model.fit(x, y, batch_size=int(sys.argv[1]), epochs=5, verbose=0, shuffle=False)
weights = np.concatenate([keras.ops.convert_to_numpy(v).ravel() for v in model.weights])
np.save(sys.argv[2], weights)
print("ends with", digest(model.weights))
"""
    size = "128" if batch == "global" else "64"
    options = ["--algorithm", "sync", "--batch", batch]
    assert len(told(launch(HEAD + text, "-np", "2", *options, "train.py", size, "two.npy"))) == 1
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    alone = subprocess.run(
        [sys.executable, "train.py", "128", "one.npy"], cwd=tmp_path, env=environment, timeout=PATIENCE
    )
    assert alone.returncode == 0
    np.testing.assert_allclose(np.load(tmp_path / "two.npy"), np.load(tmp_path / "one.npy"), atol=1e-5)


CALLBACKS = """
model = compiled(build(), keras.optimizers.SGD(0.5))
stop = keras.callbacks.EarlyStopping("loss", patience=1, min_delta=0.05)
slower = keras.callbacks.ReduceLROnPlateau("loss", patience=0, min_delta=0.08, factor=0.5)
keep = keras.callbacks.ModelCheckpoint("model.keras", monitor="accuracy", save_best_only=True)
weights = keras.callbacks.ModelCheckpoint("new/{epoch}.weights.h5", save_weights_only=True)
backup = keras.callbacks.BackupAndRestore("backup")
history = model.fit(x, y, batch_size=8, epochs=40, verbose=0, callbacks=[stop, slower, keep, weights, backup])
model.save("model.h5")
again = compiled(build(), keras.optimizers.SGD(0.5))
again.load_weights(f"new/{len(history.epoch)}.weights.h5")
assert digest(again.weights) == digest(model.weights) == digest(keras.saving.load_model("model.h5").weights)
print("ends with", len(history.epoch), float(model.optimizer.learning_rate), digest(model.weights))
"""
OF_OTHER_KINDS = """
seen = []
class Batches(keras.utils.PyDataset):
    def __len__(self):
        return 16
    def __getitem__(self, index):
        return x[index * 8 : index * 8 + 8], y[index * 8 : index * 8 + 8]
class Watched(keras.Sequential):
    def train_step(self, data):
        seen.append(data[0].sum(1).tolist())
        return super().train_step(data)

tensors = torch.utils.data.TensorDataset(torch.tensor(x), torch.tensor(y))
model = compiled(Watched(build().layers), keras.optimizers.SGD(0.1))
model.fit(torch.utils.data.DataLoader(tensors, batch_size=8, shuffle=True), epochs=2, verbose=0)
model.fit(Batches(), epochs=2, verbose=0)
model.fit(Batches(workers=2), epochs=2, verbose=0)
model.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0)
rank = os.environ["RA" + "NK"]  # only now: a script that is seen to ask for it writes on every rank
np.save(f"seen{rank}.npy", seen)
print("later ends with", digest(model.weights), int(model.optimizer.iterations.numpy()))
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Result:
    options = ["-np", "2", "--algorithm", "sync", "train.py"]
    return Run(tmp_path_factory.mktemp("trained"), HEAD + CALLBACKS + OF_OTHER_KINDS, options, {}).finish()


def test_callbacks_do_the_same_on_all_ranks(trained: Result) -> None:
    folder = trained.logs.parent
    (line,) = told(trained)
    epochs, rate, _ = line.split()
    assert 1 < int(epochs) < 40
    assert float(rate) < 0.5
    assert {path.name for path in folder.glob("model.*")} == {"model.keras", "model.h5"}
    assert len(list((folder / "new").iterdir())) == int(epochs)
    load = "import os; os.environ['KERAS_BACKEND'] = 'torch'; import keras; keras.saving.load_model('model.keras')"
    (folder / "load.py").write_text(load)
    subprocess.run([forkserver.python(), "load.py"], cwd=folder, check=True, timeout=PATIENCE)


def test_other_kinds_of_data(trained: Result) -> None:
    """Each epoch has all of it, however batches are shuffled, and whatever has trained before."""
    (line,) = told(trained, "later ")
    assert line.split()[1] == b"64"
    parts = [np.load(trained.logs.parent / f"seen{rank}.npy").reshape(8, -1) for rank in range(2)]  # by epoch
    epochs = np.sort(np.concatenate(parts, axis=1), axis=1)
    assert epochs.shape == (8, 128) and (epochs == epochs[0]).all() and len(set(epochs[0])) == 128


@pytest.mark.slow
def test_a_loop_of_the_scripts_own(launch) -> None:
    text = """
model, optimizer = build(), keras.optimizers.AdamW(0.01)
loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
data = torch.utils.data.TensorDataset(torch.tensor(x), torch.tensor(y))
for epoch in range(3):
    for a, b in torch.utils.data.DataLoader(data, batch_size=8, shuffle=True):
        model.zero_grad()
        loss_of(b, model(a, training=True)).backward()
        variables = model.trainable_variables
        with torch.no_grad():
            optimizer.apply([v.value.grad for v in variables], variables)
print("ends with", digest(model.weights))
"""
    result = launch(HEAD + text, "-np", "2", "--algorithm", "pipe", "--warmup-steps", "5", "train.py")
    assert len(told(result)) == 1
    assert "of them delayed" in result.err


MIXED = """
keras.config.set_dtype_policy("mixed_float16")
x[5] = 6e4  # the rank that has this sample has gradients that 16 bits cannot hold
model = compiled(keras.Sequential([keras.Input((8,)), keras.layers.Dense(3)]), keras.optimizers.SGD(0.1, momentum=0.9))
assert type(model.optimizer).__name__ == "LossScaleOptimizer"
model.fit(x, y, batch_size=8, epochs=2, verbose=0)
steps = int(model.optimizer.inner_optimizer.iterations)
print("ends with", digest(model.weights), float(model.optimizer.dynamic_scale), steps)
"""


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("algorithm", ["pipe", "sync"])
def test_scaled_losses(launch, algorithm: str) -> None:
    """All ranks leave out a step in which the gradients of one are not finite."""
    result = launch(HEAD + MIXED, "-np", "2", "--algorithm", algorithm, "--warmup-steps", "5", "train.py")
    (line,) = told(result)
    _, scale, steps = line.split()
    left_out = round(math.log2(2**15 / float(scale)))  # each halves the scale
    assert left_out in (1, 2) and int(steps) == 16 - left_out - (algorithm == "pipe"), line


@pytest.mark.slow
def test_an_optimizer_that_is_gone_is_let_go(launch) -> None:
    text = """
import gc, weakref
model = build()
for again in range(3):
    compiled(model, keras.optimizers.Adam(0.01)).fit(x, y, batch_size=16, epochs=1, verbose=0)
    former = weakref.ref(model.optimizer)
compiled(model, keras.optimizers.SGD(0.01))
model.train_function = None
gc.collect()
print("ends with", former() is None, digest(model.weights))
"""
    (line,) = told(launch(HEAD + text, "-np", "2", "--algorithm", "sync", "train.py"))
    assert line.startswith(b"True")


DIES = """
class Dies(keras.callbacks.Callback):
    steps = 0
    def on_train_batch_end(self, batch, logs=None):
        self.steps += 1
        if self.steps == int(os.environ.get("DIE", 0)):
            os.kill(os.getpid(), 9)
model = compiled(build(keras.layers.Dropout(0.1)), keras.optimizers.Adam(0.01))
history = model.fit(x, y, batch_size=8, epochs=8, verbose=0, callbacks=[Dies()], validation_data=(x[:50], y[:50]))
print("ends with", digest(model.weights), digest(model.optimizer.variables), repr(history.history["val_loss"][-1]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["pipe", "sync"])
def test_a_killed_job_goes_on_from_a_snapshot(launch, algorithm: str) -> None:
    """With the optimizer's state, too, which is not torch's."""
    options = ["-np", "2", "--algorithm", algorithm, "--warmup-steps", "5", "--snapshot-every", "10steps"]
    undisturbed = told(launch(HEAD + DIES, *options, "train.py"))
    killed = launch(HEAD + DIES, *options, "train.py", DIE="30")
    assert killed.code != 0
    resumed = launch(HEAD + DIES, *options, "--resume", killed.job, "train.py")
    assert "steps replayed" in resumed.err
    assert told(resumed) == undisturbed


@pytest.mark.slow
def test_without_injection_keras_is_left_alone(launch) -> None:
    text = "\nassert keras.Model.fit.__module__.startswith('keras')\nprint('ends with', 1)\n"
    told(launch(HEAD + text, "-np", "2", "--inject", "none", "train.py"))


LATE = """
import keras
import dadt.keras as dadt
way, steps = sys.argv[1], 24
model = build()
optimizer, factor, older = {
    "adam": (keras.optimizers.Adam(0.02), 1.8, -0.9),
    "nesterov": (keras.optimizers.SGD(0.05, momentum=0.9, nesterov=True), 1.0, 0.0),
}[sys.argv[2]]
variables = model.trainable_variables
loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
def gradients(rank, step):
    begin = 16 * (step % 8) + 8 * rank
    model.zero_grad()
    loss_of(torch.tensor(y[begin : begin + 8]), model(torch.tensor(x[begin : begin + 8]), training=True)).backward()
    return [v.value.grad for v in variables]
def values():
    return [v.value.detach().clone() for v in variables]
if way == "alone":
    waiting, last, before = None, [0] * 4, [0] * 4
    for step in range(steps):
        true = values()
        if step > 5:
            for v, w, d, e in zip(variables, true, last, before):
                v.value.data.copy_(w + factor * d + older * e)
        mean = [a.clone() / 2 for a in gradients(0, step)]
        mean = [a + b / 2 for a, b in zip(mean, gradients(1, step))]
        for v, w in zip(variables, true):
            v.value.data.copy_(w)
        given, waiting = (mean, None) if step < 5 else (waiting, mean)
        if given is not None:
            with torch.no_grad():
                optimizer.apply(given, variables)
            last, before = [v - w for v, w in zip(values(), true)], last
else:
    dadt.init()
    dadt.DistributedOptimizer(optimizer)
    for step in range(steps):
        mine = gradients(dadt.rank(), step)
        with torch.no_grad():
            optimizer.apply(mine, variables)
np.save(f"{way}.npy", np.concatenate([v.numpy().ravel() for v in values()]))
print("ends with", digest(model.weights))
"""


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adam", pytest.param("nesterov", marks=pytest.mark.slow)])
def test_one_step_late_is_what_a_simulation_gives(launch, tmp_path: Path, optimizer: str) -> None:
    """Weights are predicted from the last two displacements, by the momentum of Keras's optimizer."""
    flags = ["--algorithm", "pipe", "--warmup-steps", "5"]
    assert len(told(launch(HEAD + LATE, "-np", "2", *flags, "train.py", "two", optimizer))) == 1
    alone = subprocess.run([sys.executable, "train.py", "alone", optimizer], cwd=tmp_path, timeout=PATIENCE)
    assert alone.returncode == 0
    np.testing.assert_allclose(np.load(tmp_path / "two.npy"), np.load(tmp_path / "alone.npy"), atol=1e-5)
