"""Keras on torch in scripts that know of ranks: dadt.keras, and Horovod's API for Keras."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from frontends.test_keras import HEAD, told
from harness import forkserver
from harness.patience import PATIENCE

DADT = HEAD.replace("import keras, numpy as np, torch\n", "import keras, numpy as np, torch\nimport {module} as hvd\n")
TRAIN = """
hvd.init()
mine = slice(hvd.rank(), None, hvd.size())
model = build()
optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.05, momentum=0.9, clipnorm=0.5))
compiled(model, optimizer)
if hvd.rank():
    model.layers[0].kernel.assign(model.layers[0].kernel * 2)
told = [hvd.callbacks.BroadcastGlobalVariablesCallback(0), hvd.callbacks.MetricAverageCallback()]
history = model.fit(x[mine], y[mine], batch_size=8, epochs=4, verbose=0, shuffle=False, callbacks=told)
np.save(f"rank{hvd.rank()}.npy", np.concatenate([keras.ops.convert_to_numpy(v).ravel() for v in model.weights]))
print("ends with", digest(model.weights), repr(history.history))
"""


OPERATIONS = """
rank = hvd.rank()
v = keras.Variable(np.full((2, 2), rank + 1.0, "float32"))
assert hvd.allreduce(v).tolist() == [[1.5, 1.5], [1.5, 1.5]]
assert hvd.allreduce(np.float32(rank)).tolist() == 0.5
assert hvd.allgather(np.arange(rank + 1)).tolist() == [0, 0, 1]
assert hvd.broadcast(v, 1).tolist() == [[2, 2], [2, 2]]
own = keras.optimizers.SGD(0.1)
own.build([v])
own.apply([torch.full((2, 2), rank + 1.0)])
assert abs(float(v[0, 0]) - 0.9 * (rank + 1)) < 1e-6, "it was not wrapped"
w = keras.Variable(np.zeros(3, "float32"))
total = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), **{total})
total.build([w])
total.apply([torch.full((3,), rank + 1.0)])
assert keras.ops.convert_to_numpy(w).tolist() == [-3, -3, -3]
"""
OWN = """
hvd.broadcast_variables([v], 1)
assert abs(float(v[0, 0]) - 1.8) < 1e-6
"""
HOROVOD = """
assert abs(float(hvd.allreduce(v, op=hvd.Max).max()) - 1.8) < 1e-6
assert hvd.reducescatter(np.arange(4.0)).tolist() == [[0, 1], [2, 3]][rank]
for wrong, words in (
    ({"compression": hvd.Compression.fp16}, "use --compression"),
    ({"backward_passes_per_step": 2}, "use gradient_accumulation_steps"),
    ({"op": hvd.Adasum}, "op is not supported"),
):
    try:
        hvd.DistributedOptimizer(keras.optimizers.SGD(), **wrong)
    except ValueError as error:
        assert words in str(error), error
    else:
        raise AssertionError(wrong)
if rank == 0:
    compiled(build(), keras.optimizers.SGD(0.1)).save("saved.keras")
hvd.allreduce(0.0)
model = hvd.load_model("saved.keras")
mine = slice(rank, None, 2)
model.fit(x[mine], y[mine], batch_size=8, epochs=1, verbose=0)
print("later ends with", digest(model.weights))
"""
WITH_OPERATIONS = {
    "dadt.keras": OPERATIONS.replace("{total}", '{"reduction": "sum"}') + OWN,
    "horovod.keras": OPERATIONS.replace("{total}", '{"op": hvd.Sum}') + HOROVOD,
}
ALONE = """
model = compiled(build(), keras.optimizers.SGD(0.05, momentum=0.9, clipnorm=0.5))
model.fit(x, y, batch_size=16, epochs=4, verbose=0, shuffle=False)
np.save("alone.npy", np.concatenate([keras.ops.convert_to_numpy(v).ravel() for v in model.weights]))
"""


@pytest.mark.sample(1)
@pytest.mark.parametrize("module", WITH_OPERATIONS)
def test_ranks_train_on_their_own_data_and_combine_values(launch, tmp_path: Path, module: str) -> None:
    text = DADT.replace("{module}", module) + TRAIN + WITH_OPERATIONS[module]
    result = launch(text, "-np", "2", "--algorithm", "sync", "train.py")
    assert len(told(result)) == 1
    assert module == "dadt.keras" or len(told(result, "later ")) == 1
    assert "delayed by one" not in result.err
    (tmp_path / "alone.py").write_text(HEAD + ALONE)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([forkserver.python(), "alone.py"], cwd=tmp_path, env=environment, timeout=PATIENCE, check=True)
    np.testing.assert_allclose(np.load(tmp_path / "rank0.npy"), np.load(tmp_path / "alone.npy"), atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("module", "chosen"), [("dadt.keras", ["--algorithm", "pipe"]), ("horovod.keras", [])])
def test_ranks_train_one_step_late_and_as_horovod_would(launch, module: str, chosen: list[str]) -> None:
    text = DADT.replace("{module}", module) + TRAIN
    result = launch(text, "-np", "2", *chosen, "--warmup-steps", "5", "train.py")
    assert len(told(result)) == 1
    assert ("delayed by one" in result.err) == (module == "dadt.keras")


@pytest.mark.slow
def test_scaled_losses(launch) -> None:
    """The wrapped optimizer is within the one that scales: all ranks leave out what one has to."""
    text = """
hvd.init()
keras.config.set_dtype_policy("mixed_float16")
x[4] = 6e4
mine = slice(hvd.rank(), None, hvd.size())
model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(3)])
compiled(model, hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)))
model.fit(x[mine], y[mine], batch_size=8, epochs=2, verbose=0)
steps = int(model.optimizer.inner_optimizer.iterations)
print("ends with", digest(model.weights), 16 - steps, float(model.optimizer.dynamic_scale))
"""
    (line,) = told(launch(DADT.replace("{module}", "dadt.keras") + text, "-np", "2", "--algorithm", "sync", "train.py"))
    _, left_out, scale = line.split()
    assert int(left_out) in (1, 2) and float(scale) == 2 ** (15 - int(left_out))


@pytest.mark.slow
def test_the_learning_rate_warms_up(launch) -> None:
    text = """
hvd.init()
mine = slice(hvd.rank(), None, hvd.size())
model = compiled(build(), hvd.DistributedOptimizer(keras.optimizers.SGD(0.4, momentum=0.9)))
rates, momenta = [], []
class Look(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        rates.append(float(model.optimizer.learning_rate))
        momenta.append(float(model.optimizer.momentum))
later = hvd.callbacks.LearningRateScheduleCallback(0.4, 0.1, start_epoch=2)
history = model.fit(x[mine], y[mine], batch_size=16, epochs=3, verbose=0,
                    callbacks=[hvd.callbacks.LearningRateWarmupCallback(0.4, 2, verbose=1), later, Look()])
assert len(rates) == 12, rates
assert all(a < b for a, b in zip(rates[:7], rates[1:8])), rates
assert abs(rates[0] - 0.2 - 0.2 / 8) < 1e-6 and abs(rates[7] - 0.4) < 1e-6, rates
assert all(abs(rate - 0.04) < 1e-6 for rate in rates[8:]), rates
assert momenta[-1] == 0.9
print("ends with", digest(model.weights), history.history["lr"])
"""
    result = launch(DADT.replace("{module}", "dadt.keras") + text, "-np", "2", "--algorithm", "sync", "train.py")
    assert len(told(result)) == 1
    assert "dadt: epoch 2: the learning rate has warmed up to 0.4\n" in result.err


@pytest.mark.slow
def test_another_backend_is_refused() -> None:
    text = "import keras; keras.backend.backend = lambda: 'jax'; import dadt.keras"
    environment = {**os.environ, "KERAS_BACKEND": "torch"}
    done = subprocess.run(
        [sys.executable, "-c", text], capture_output=True, text=True, timeout=PATIENCE, env=environment
    )
    assert done.returncode == 1
    assert "ConfigError: dadt.keras: Keras's backend is jax here" in done.stderr
