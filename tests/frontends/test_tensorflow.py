"""Keras on TensorFlow, in scripts that say nothing of DADT, and dadt.tensorflow.

`make .venv-tensorflow/installed` installs TensorFlow, which is large.
"""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
from pathlib import Path

import numpy as np
import pytest
from harness import ROOT
from harness.patience import PATIENCE

BIN = ROOT / ".venv-tensorflow" / "bin"
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not BIN.is_dir(), reason="needs `make .venv-tensorflow/installed`")]
HEAD = """
import hashlib, os, sys
import keras, numpy as np
generator = np.random.default_rng(0)
x = generator.normal(size=(128, 8)).astype("float32")
y = (x @ generator.normal(size=(8, 3))).argmax(1)
loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

def build(*layers):
    first, last = keras.layers.Dense(16, activation="tanh"), keras.layers.Dense(3)
    return keras.Sequential([keras.Input((8,)), first, *layers, last])

def compiled(model, optimizer):
    model.compile(optimizer=optimizer, loss=loss_of, metrics=["accuracy"])
    return model

def digest(variables):
    return hashlib.sha256(b"".join(v.numpy().tobytes() for v in variables)).hexdigest()
"""
ENVIRONMENT = {
    **os.environ, "KERAS_BACKEND": "tensorflow", "TF_CPP_MIN_LOG_LEVEL": "3", "OMP_NUM_THREADS": "1",
    "TF_DETERMINISTIC_OPS": "1",
}  # fmt: skip


def by_two(folder: Path, text: str, *flags: str, code: int = 0) -> tuple[str, str]:
    """What both ranks end with, and what is said."""
    (folder / "train.py").write_text(HEAD + text)
    command = [str(BIN / "dadt"), "run", "-np", "2", *flags, *([] if "train.py" in flags else ["train.py"])]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=PATIENCE, env=ENVIRONMENT)
    assert done.returncode == code, done.stdout + done.stderr
    ends = re.findall(r"^\[\d\] ends with (.*)$", done.stdout, re.MULTILINE)
    assert code or (len(ends) == 2 and ends[0] == ends[1]), done.stdout + done.stderr
    return ends[0] if ends else "", done.stdout + done.stderr


FIT = """
model = compiled(build(keras.layers.BatchNormalization(), keras.layers.Dropout(0.1)), keras.optimizers.Adam(0.01))
history = model.fit(x, y, batch_size=8, epochs=4, verbose=2, validation_data=(x[:50], y[:50]))
print("ends with", digest(v for v in model.variables if "seed" not in v.path), repr(history.history))
"""


@pytest.mark.parametrize("algorithm", ["sync", "pipe"])
def test_fit(tmp_path: Path, algorithm: str) -> None:
    ends, said = by_two(tmp_path, FIT, "--algorithm", algorithm, "--warmup-steps", "5")
    assert ("32 steps, none delayed" if algorithm == "sync" else "32 steps, 27 of them delayed") in said
    assert said.count("Epoch 4/4") == 1 and "8/8 - " in said and "ran out of data" not in said
    accuracies = [float(each) for each in re.search(r"'val_accuracy': \[(.*?)\]", ends)[1].split(", ")]
    assert accuracies[-1] > 0.7


HIDDEN_LATE = """
import threading
import tensorflow as tf
from dadt.frontends.keras import hook, on_tensorflow
from dadt.frontends.tensorflow import prediction
read = threading.Event()
class Displacement(prediction.Displacement):
    def hide(self, shown):
        def late(ahead):
            read.wait(0.5)  # for a step that reads weights too early, which shall not come
            return ahead
        ahead, self.ahead = self.ahead, tf.numpy_function(late, [self.ahead], tf.bool, stateful=False)
        super().hide(shown)
        self.ahead = ahead
class Mirror(on_tensorflow.Mirror):
    def average(self, *given):
        found = super().average(*given)
        read.set()
        return found
prediction.Displacement, on_tensorflow.Mirror = Displacement, Mirror
true = []
class Compared(keras.callbacks.Callback):
    def on_train_batch_begin(self, batch, logs=None):
        read.clear()
        self.before = [v.numpy() for v in model.trainable_variables]
    def on_train_batch_end(self, batch, logs=None):
        (mirror,) = hook._installed[0]._every()
        true.append(all((p.detach().numpy() == w).all() for p, w in zip(mirror._parameters, self.before)))
model = compiled(build(), keras.optimizers.SGD(0.1, momentum=0.9))
model.fit(x, y, batch_size=8, epochs=1, verbose=0, callbacks=[Compared()])
print("ends with", true)
"""


def test_a_step_reads_true_weights(tmp_path: Path) -> None:
    """Also where the graph puts these back as late as it may."""
    ends, _ = by_two(tmp_path, HIDDEN_LATE, "--algorithm", "pipe", "--warmup-steps", "2")
    assert ends == str([True] * 8)


def test_scaled_losses(tmp_path: Path) -> None:
    """All ranks leave out a step in which the gradients of one are not finite."""
    text = """
keras.config.set_dtype_policy("mixed_float16")
x[5] = 6e4
model = compiled(keras.Sequential([keras.Input((8,)), keras.layers.Dense(3)]), keras.optimizers.SGD(0.1, momentum=0.9))
model.fit(x, y, batch_size=8, epochs=2, verbose=0)
steps = int(model.optimizer.inner_optimizer.iterations)
print("ends with", digest(model.weights), float(model.optimizer.dynamic_scale), steps)
"""
    ends, _ = by_two(tmp_path, text, "--algorithm", "sync")
    _, scale, steps = ends.split()
    left_out = round(math.log2(2**15 / float(scale)))  # each halves the scale
    assert left_out in (1, 2) and int(steps) == 16 - left_out, ends


def test_two_workers_take_the_steps_of_one(tmp_path: Path) -> None:
    text = """
keras.utils.set_random_seed(1)
model = compiled(build(), keras.optimizers.SGD(0.1, momentum=0.9, clipnorm=0.5))
model.fit(x, y, batch_size=int(os.environ["BATCH"]), epochs=5, verbose=0, shuffle=False)
np.save(f"{os.environ['BATCH']}.npy", np.concatenate([v.numpy().ravel() for v in model.weights]))
print("ends with", digest(model.weights))
"""
    by_two(tmp_path, 'os.environ["BATCH"] = "32"' + text, "--algorithm", "sync")
    command = [str(BIN / "python"), "train.py"]
    (tmp_path / "train.py").write_text(HEAD + 'os.environ["BATCH"] = "64"' + text)
    subprocess.run(command, cwd=tmp_path, env=ENVIRONMENT, timeout=PATIENCE, check=True)
    np.testing.assert_allclose(np.load(tmp_path / "32.npy"), np.load(tmp_path / "64.npy"), atol=1e-5)


def test_other_kinds_of_data_and_loops(tmp_path: Path) -> None:
    text = """
import tensorflow as tf
data = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(128).batch(8)
model = compiled(build(), keras.optimizers.SGD(0.1))
model.fit(data, epochs=2, verbose=0)
class Batches(keras.utils.PyDataset):
    def __len__(self):
        return 16
    def __getitem__(self, index):
        return x[index * 8 : index * 8 + 8], y[index * 8 : index * 8 + 8]
model.fit(Batches(), epochs=2, verbose=0)
assert int(model.optimizer.iterations) == 32, model.optimizer.iterations
own, optimizer = build(), keras.optimizers.AdamW(0.01)
@tf.function
def step(a, b):
    with tf.GradientTape() as tape:
        loss = loss_of(b, own(a, training=True))
    optimizer.apply_gradients(zip(tape.gradient(loss, own.trainable_variables), own.trainable_variables))
    return loss
for a, b in data:
    step(a, b)
print("ends with", digest(own.weights), digest(model.weights))
"""
    by_two(tmp_path, text, "--algorithm", "sync")


def test_what_cannot_be_done_is_said(tmp_path: Path) -> None:
    text = "\ncompiled(build(), keras.optimizers.SGD(0.1)).fit(x, y, batch_size=128, verbose=0)\n"
    _, said = by_two(tmp_path, text, code=2)
    assert "fit: an epoch of 1 batches cannot be divided among 2 workers" in said
    text = "\ncompiled(build(), keras.optimizers.SGD(0.1)).fit(x, y, batch_size=8, verbose=0)\n"
    for flags in (["--algorithm", "local"], ["--batch", "global"], ["--min-np", "1"]):
        _, said = by_two(tmp_path, text, *flags, code=2)
        assert f"{flags[0]} {flags[1]}: Keras on TensorFlow" in said
    _, said = by_two(tmp_path, text, "--verify-every", "2", code=2)
    assert "--verify-every: Keras on TensorFlow" in said


def test_data_is_divided_anew_in_each_epoch(tmp_path: Path) -> None:
    """Each sample comes to one of the ranks, once an epoch, in an order that differs."""
    text = """
import json
x[:, 0] = np.arange(128)
seen = []
class See(keras.layers.Layer):
    def call(self, inputs, training=False):
        if training:
            import tensorflow as tf
            tf.py_function(lambda numbers: seen.append([int(n) for n in numbers]), [inputs[:, 0]], [])
        return inputs
class Batches(keras.utils.PyDataset):
    def __len__(self):
        return 16
    def __getitem__(self, index):
        return x[index * 8 : index * 8 + 8], y[index * 8 : index * 8 + 8]
model = keras.Sequential([keras.Input((8,)), See(), keras.layers.Dense(3)])
model.compile(keras.optimizers.SGD(1e-6), loss_of, jit_compile=True)
model.train_on_batch(x[:8], y[:8])
seen.clear()
model.fit(x, y, batch_size=8, epochs=2, verbose=0)
model.fit(Batches(), epochs=2, verbose=0)
model.fit(x, y, batch_size=8, epochs=2, steps_per_epoch=16, verbose=0)
model.fit(Batches(workers=2), epochs=2, verbose=0)
import tensorflow as tf
data = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(128)
data = data.map(lambda a, b: (a + 0.0, b), num_parallel_calls=4, deterministic=False).batch(8)
model.fit(data, epochs=2, verbose=0)
print("saw", json.dumps(seen))
print("ends with", digest(model.weights))
"""
    _, said = by_two(tmp_path, text, "--algorithm", "sync")
    assert said.count("dadt: compile(jit_compile=True): XLA compiles no step that averages gradients") == 1
    ranks = [json.loads(each) for each in re.findall(r"^\[\d\] saw (.*)$", said, re.MULTILINE)]
    epochs = [[[n for step in rank[8 * e : 8 * e + 8] for n in step] for rank in ranks] for e in range(10)]
    assert all(sorted(a + b) == list(range(128)) for a, b in epochs)
    assert len({str(a) for a, _ in epochs}) == 10
    assert {len(rank) for rank in ranks} == {80}


def test_a_model_that_is_loaded_trains_on(tmp_path: Path) -> None:
    text = """
model = compiled(build(), keras.optimizers.Adam(0.01))
model.fit(x, y, batch_size=8, epochs=1, verbose=0, callbacks=[keras.callbacks.ModelCheckpoint("model.keras")])
model = keras.models.load_model("model.keras")
model.fit(x, y, batch_size=8, epochs=1, verbose=0)
print("ends with", int(model.optimizer.iterations), digest(model.weights))
"""
    ends, _ = by_two(tmp_path, text, "--algorithm", "sync")
    assert ends.startswith("16 ")


def test_optimizers_that_share_variables_leave_each_others_alone(tmp_path: Path) -> None:
    """The first one has predicted weights, and is still there when another trains them."""
    text = """
first = keras.optimizers.SGD(0.1, momentum=0.9)
model = compiled(build(), first)
model.fit(x, y, batch_size=8, epochs=2, verbose=0)
moved = digest(model.trainable_variables)
compiled(model, keras.optimizers.SGD(0.0, momentum=0.9)).fit(x, y, batch_size=8, epochs=2, verbose=0)
assert digest(model.trainable_variables) == moved
model.layers[0].trainable = False
compiled(model, first).fit(x, y, batch_size=8, epochs=1, verbose=0)
print("ends with", digest(model.weights))
"""
    by_two(tmp_path, text, "--algorithm", "pipe", "--warmup-steps", "5")


def test_a_worker_that_ends_is_named(tmp_path: Path) -> None:
    text = """
class End(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if batch == 3 and os.environ["RA" + "NK"] == "1":
            raise ValueError("this is why")
compiled(build(), keras.optimizers.SGD(0.1)).fit(x, y, batch_size=8, epochs=9, verbose=0, callbacks=[End()])
"""
    _, said = by_two(tmp_path, text, "--algorithm", "sync", code=1)
    assert "dadt: worker 1 failed" in said and "ValueError: this is why" in said[said.rindex("dadt: worker 1 failed") :]


OPERATIONS = """
import tensorflow as tf
import dadt.tensorflow as dadt
dadt.init()
rank, size = dadt.rank(), dadt.size()
for wrap in (lambda f: f, tf.function):
    for dtype in (tf.bfloat16, tf.float16, tf.float32, tf.float64, tf.int32, tf.int64, tf.uint8):
        v = tf.cast(tf.fill([2, 3], rank + 1), dtype)
        assert wrap(lambda v: dadt.allreduce(v, "sum"))(v).numpy().tolist() == [[3] * 3] * 2
        assert wrap(lambda v: dadt.allreduce(v, "max"))(v).numpy().tolist() == [[2] * 3] * 2
        assert wrap(lambda v: dadt.broadcast(v, 1))(v).numpy().tolist() == [[2] * 3] * 2
        unequal = tf.cast(tf.fill([rank + 1, 2], rank), dtype)
        assert wrap(dadt.allgather)(unequal).numpy().tolist() == [[0, 0], [1, 1], [1, 1]]

    def gradient(operation, v):
        with tf.GradientTape() as tape:
            tape.watch(v)
            out = operation(v)
            numbers = tf.range(tf.cast(tf.size(out), tf.float32))
            loss = tf.reduce_sum(out * numbers) * (rank + 1.0)
        return tape.gradient(loss, v)

    v = tf.constant([5.0, 6.0])
    assert wrap(lambda v: gradient(dadt.allreduce, v))(v).numpy().tolist() == [0, 1.5]
    assert wrap(lambda v: gradient(lambda v: dadt.allreduce(v, "sum"), v))(v).numpy().tolist() == [0, 3]
    assert wrap(lambda v: gradient(dadt.broadcast, v))(v).numpy().tolist() == ([0, 3] if rank == 0 else [0, 0])
    part = tf.ones([rank + 1])
    assert wrap(lambda v: gradient(dadt.allgather, v))(part).numpy().tolist() == ([0] if rank == 0 else [3, 6])
sparse = tf.IndexedSlices(tf.ones([1, 2]), tf.constant([rank]), tf.constant([3, 2]))
assert dadt.allreduce(sparse, "sum").numpy().tolist() == [[1, 1], [1, 1], [0, 0]]
v = tf.Variable([float(rank)] * 3)
dadt.broadcast_variables([v], 1)
assert v.numpy().tolist() == [1, 1, 1]
"""
TRAIN = """
keras.utils.set_random_seed(rank)
model, optimizer = build(), keras.optimizers.SGD(0.1, momentum=0.9)
dadt.broadcast_variables(model.variables)
@tf.function
def step(a, b):
    with dadt.DistributedGradientTape(tf.GradientTape()) as tape:
        loss = loss_of(b, model(a, training=True))
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables))
    return loss
losses = [float(step(x[i + 4 * rank : i + 4 * rank + 4], y[i + 4 * rank : i + 4 * rank + 4])) for i in range(0, 120, 8)]
step(x[: 4 - rank], y[: 4 - rank])  # one rank traces the step once more
step(x[:4], y[:4])
other = build()
dadt.broadcast_variables(other.variables)
other.compile(optimizer=dadt.DistributedOptimizer(keras.optimizers.Adam(0.01)), loss=loss_of)
other.fit(x[rank::size], y[rank::size], batch_size=8, epochs=2, verbose=0)
assert int(other.optimizer.iterations) == 16
begin, end = (float(dadt.allreduce(sum(each))) for each in (losses[:5], losses[-5:]))
assert end < begin, losses
print("ends with", digest(model.variables), digest(other.variables))
"""


def test_operations_tapes_and_optimizers(tmp_path: Path) -> None:
    by_two(tmp_path, OPERATIONS + TRAIN, "--algorithm", "sync")


HOROVOD = """
import tensorflow as tf
import horovod.{module} as hvd
hvd.init()
keras.utils.set_random_seed(1 + hvd.rank())
assert hvd.allreduce(tf.constant([1.0 + hvd.rank()]), op=hvd.Sum).numpy().tolist() == [3]
assert hvd.allgather(tf.fill([1, 2], hvd.rank())).numpy().tolist() == [[0, 0], [1, 1]]
model = build()
optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.05 * hvd.size(), momentum=0.9))
compiled(model, optimizer)
told = [
    hvd.callbacks.BroadcastGlobalVariablesCallback(0),
    hvd.callbacks.MetricAverageCallback(),
    hvd.callbacks.LearningRateWarmupCallback(0.05 * hvd.size(), warmup_epochs=2),
]
mine = slice(hvd.rank(), None, hvd.size())
history = model.fit(x[mine], y[mine], batch_size=8, epochs=4, verbose=0, callbacks=told)
print("ends with", digest(model.weights), repr(history.history))
"""
TAPE = """
import tensorflow as tf
import horovod.tensorflow as hvd
hvd.init()
model, optimizer, first = build(), keras.optimizers.Adam(0.01), True
mine = slice(hvd.rank(), None, hvd.size())
data = tf.data.Dataset.from_tensor_slices((x[mine], y[mine])).shuffle(64, seed=hvd.rank()).batch(8).repeat(3)
@tf.function
def step(a, b):
    with tf.GradientTape() as tape:
        loss = loss_of(b, model(a, training=True))
    tape = hvd.DistributedGradientTape(tape)
    optimizer.apply_gradients(zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables))
    return loss
for a, b in data:
    step(a, b)
    if first:
        hvd.broadcast_variables(model.variables, root_rank=0)
        hvd.broadcast_variables(optimizer.variables, root_rank=0)
        first = False
try:
    hvd.DistributedGradientTape(tf.GradientTape(), compression=hvd.Compression.fp16)
except ValueError as error:
    assert "compression is not supported with Keras and TensorFlow; use --compression" in str(error)
print("ends with", digest(model.weights))
"""


@pytest.mark.parametrize("module", ["keras", "tensorflow.keras"])
def test_a_script_for_horovods_keras(tmp_path: Path, module: str) -> None:
    ends, said = by_two(tmp_path, HOROVOD.replace("{module}", module))
    assert "horovod is not installed: DADT takes its place, with --algorithm sync" in said
    losses = [float(each) for each in re.search(r"'loss': \[(.*?)\]", ends)[1].split(", ")]
    assert losses[-1] < losses[0]


def test_a_script_for_horovods_tape(tmp_path: Path) -> None:
    by_two(tmp_path, TAPE)


LATE = """
import tensorflow as tf
way, optimizer = sys.argv[1:]
keras.utils.set_random_seed(1)
model = build()
optimizer, factor, older = {
    "adam": (keras.optimizers.Adam(0.02), 1.8, -0.9),
    "nesterov": (keras.optimizers.SGD(0.05, momentum=0.9, nesterov=True), 1.0, 0.0),
    "plain": (keras.optimizers.SGD(0.2), 0.0, 0.0),
}[optimizer]
variables, steps = model.trainable_variables, 24
def gradients(a, b):
    with tf.GradientTape() as tape:
        loss = loss_of(b, model(a, training=True))
    return tape.gradient(loss, variables)
def batch(rank, step):
    begin = 16 * (step % 8) + 8 * rank
    return x[begin : begin + 8], y[begin : begin + 8]
def alone():
    waiting, last, before = None, 0, 0
    for step in range(steps):
        late = step > 5
        true = [v.numpy() for v in variables]
        if late:
            for v, w, d, e in zip(variables, true, last, before):
                v.assign(w + factor * d + older * e)
        mean = [(a + b) / 2 for a, b in zip(gradients(*batch(0, step)), gradients(*batch(1, step)))]
        for v, w in zip(variables, true):
            v.assign(w)
        given, waiting = (mean, None) if step < 5 else (waiting, mean)
        if given is not None:
            optimizer.apply_gradients(zip(given, variables))
            last, before = [v.numpy() - w for v, w in zip(variables, true)], last
def train(a, b):
    if way != "within":
        optimizer.apply_gradients(zip(gradients(a, b), variables))
        return
    with tf.GradientTape() as tape:
        loss = loss_of(b, model(a, training=True))
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))
if way == "alone":
    alone()
elif way == "fit":
    compiled(model, optimizer).fit(x, y, batch_size=8, epochs=3, shuffle=False, verbose=0)
else:
    import dadt.tensorflow as dadt
    dadt.init()
    dadt.DistributedOptimizer(optimizer)
    step_of = train if way == "eager" else tf.function(train)
    for step in range(steps):
        step_of(*batch(dadt.rank(), step))
np.save(f"{way}.npy", np.concatenate([v.numpy().ravel() for v in variables]))
print("ends with", digest(variables))
"""


@pytest.mark.parametrize("way", ["eager", "function", "within", "fit"])
@pytest.mark.parametrize("optimizer", ["adam", "nesterov", "plain"])
def test_one_step_late_is_what_a_simulation_gives(tmp_path: Path, way: str, optimizer: str) -> None:
    """Weights are predicted from the last two displacements where the optimizer has a momentum."""
    by_two(tmp_path, LATE, "--algorithm", "pipe", "--warmup-steps", "5", "train.py", way, optimizer)
    command = [str(BIN / "python"), "train.py", "alone", optimizer]
    subprocess.run(command, cwd=tmp_path, env=ENVIRONMENT, timeout=PATIENCE, check=True)
    np.testing.assert_allclose(np.load(tmp_path / f"{way}.npy"), np.load(tmp_path / "alone.npy"), atol=1e-5)
