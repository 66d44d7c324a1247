"""Keras on TensorFlow, in scripts that do not use DADT's API.

TensorFlow computes in graphs, but DADT exchanges torch tensors. So where an optimizer applies gradients, the graph
passes them to Python. In Python, a torch optimizer over copies of the variables (a carrier) makes DADT's step, and the
averaged gradients return to the graph. Weights are predicted within the graph.
"""

from __future__ import annotations

import importlib
import inspect
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from dadt.config.check import predict_factors
from dadt.errors import ConfigError, DadtError
from dadt.frontends.keras import order
from dadt.frontends.keras.fit import KerasTraining, inner_of, momentum_of
from dadt.frontends.tensorflow.memory import to_numpy, to_torch
from dadt.inject import worker
from dadt.inject.foreign import Carrier, nothing
from dadt.inject.patch import replaces
from dadt.train.prediction.displacement import factors_by
from dadt.train.runtime import Runtime

ALGORITHMS = ("sync", "pipe")
"""Algorithms that Keras on TensorFlow can use. All other algorithms average weights, but DADT has only copies of
TensorFlow's weights."""


class TensorFlowCarrier(Carrier):
    def __init__(self, owner: Any, parameters: Sequence[torch.Tensor]) -> None:
        super().__init__(weakref.proxy(owner), list(parameters))
        self.title = f"Keras's {self.title}"
        self.unsuited = f"{self.title} keeps its state in TensorFlow"

    def kept(self) -> dict[str, torch.Tensor]:
        """Return an empty state, since TensorFlow itself saves the state of its optimizers."""
        return {}


class Mirror:
    """Torch copies of an optimizer's variables, and the torch optimizer over these copies that averages their
    gradients."""

    def __init__(
        self, runtime: Runtime, optimizer: Any, variables: Sequence[Any], wrapped: bool, displacement: Any
    ) -> None:
        """wrapped: whether the script has wrapped the optimizer. displacement: the Displacement that predicts the
        weights, or None."""
        self._runtime = runtime
        self.variables = list(variables)
        self.displacement = displacement
        self.error: DadtError | None = None
        """The error that made the last step fail, since TensorFlow raises an error of its own instead; None if no step
        has failed."""
        self._parameters = [torch.nn.Parameter(to_torch(v)) for v in self.variables]
        self._carrier = TensorFlowCarrier(optimizer, self._parameters)
        self._begun = False
        if wrapped:
            worker.wrap(self._carrier)

    def average(self, *given: Any) -> list[Any]:
        """Average gradients over all ranks. given: eager tensors, first the variables' values, then the gradients.
        Returns whether there are averages, whether the next ones will come late, and the averages.

        The graph passes the values, which it reads after predicted weights are replaced by the true ones. If Python
        read the variables itself, the graph would not order that read after assignments to them.
        """
        averages: list[torch.Tensor] = []
        count = len(self._parameters)
        for parameter, value, gradient in zip(self._parameters, given[:count], given[count:], strict=True):
            parameter.data.copy_(to_torch(value))
            parameter.grad = to_torch(gradient)
        self._carrier.run = lambda: averages.extend(p.grad for p in self._parameters if p.grad is not None)
        try:
            self._carrier.step()
        except DadtError as error:
            self.error = error
            raise
        finally:
            self._carrier.run = nothing
        if not self._begun:
            self._begun = True
            for variable, parameter in zip(self.variables, self._parameters, strict=True):
                # This variable takes the weights of rank 0, which the first step has sent to all ranks.
                variable.assign(to_numpy(parameter))
        late = any(a.algorithm.predicts for a in self._runtime.attachments if a.optimizer is self._carrier)
        if len(averages) < len(self._parameters):  # if averages come one step late, the first step has no averages
            return [False, late, *(to_numpy(torch.zeros_like(p)) for p in self._parameters)]
        return [True, late, *map(to_numpy, averages)]


class TensorFlowTraining(KerasTraining):
    """Hooks into Keras on TensorFlow. For each list of variables passed to an optimizer there is a Mirror."""

    def __init__(self, runtime: Runtime) -> None:
        super().__init__(runtime)
        self._tf = importlib.import_module("tensorflow")
        self._prediction: Any = importlib.import_module("dadt.frontends.tensorflow.prediction")
        self._begun: list[bool] = []
        """Whether each running `fit` has begun to read its training data, the innermost last."""
        self._mirrors: weakref.WeakKeyDictionary[Any, dict[tuple[int, ...], Mirror]] = weakref.WeakKeyDictionary()
        """Mirrors of each optimizer: one for each list of variables passed to the optimizer, by the ids of the
        variables."""

    def install(self, keras: Any) -> None:
        arrays = importlib.import_module("keras.src.trainers.data_adapters.array_data_adapter").ArrayDataAdapter
        _permute_alike(arrays, self._tf)
        self._prediction.install(lambda: [m.displacement for m in self._every() if m.displacement])
        super().install(keras)
        # patched on the base class, since Keras checks whether a model's class overrides `compile`
        self._leave_out_xla(importlib.import_module("keras.src.trainers.trainer").Trainer)
        self._divide_epochs(importlib.import_module("keras.src.backend.tensorflow.trainer").TFEpochIterator)

    def _every(self) -> list[Mirror]:
        return [mirror for mirrors in self._mirrors.values() for mirror in mirrors.values()]

    def _check(self) -> None:
        """Raise ConfigError for settings that need access to the weights, of which DADT has only copies, or that divide
        batches."""
        config = self.runtime.ranks.config
        if config.algorithm not in ALGORITHMS:
            raise ConfigError(f"--algorithm {config.algorithm}: Keras on TensorFlow trains by sync and pipe")
        if config.min_np:
            raise ConfigError(
                f"--min-np {config.min_np}: Keras on TensorFlow does not train on without a worker; use --max-restarts"
            )
        if config.verify_every:
            raise ConfigError(
                "--verify-every: Keras on TensorFlow keeps weights that DADT cannot compare; leave it out"
            )
        if config.batch != "per-rank" and not self.runtime.script.explicit:
            raise ConfigError(f"--batch {config.batch}: Keras on TensorFlow divides epochs, not batches; leave it out")

    def _displacement(self, optimizer: Any, variables: Sequence[Any]) -> Any:
        """Return a Displacement that predicts the optimizer's variables; None if this optimizer's variables are not
        predicted."""
        if self.runtime.ranks.config.algorithm != "pipe" or inner_of(optimizer).gradient_accumulation_steps:
            return None
        factors = predict_factors(self.runtime.ranks.config.predict) or factors_by(**momentum_of(optimizer))
        return self._prediction.Displacement(variables, *factors) if any(factors) else None

    def _others(self, mirror: Mirror) -> list[Any]:
        """Return the Displacements of other Mirrors that predict some of the same variables, whose predictions become
        invalid by a step of this Mirror."""
        ids = set(map(id, mirror.variables))
        others = [m for m in self._every() if m is not mirror and ids & set(map(id, m.variables))]
        return [m.displacement for m in others if m.displacement]

    def _mirror_of(self, optimizer: Any, variables: Sequence[Any]) -> Mirror:
        mirrors, which = self._mirrors.setdefault(optimizer, {}), tuple(map(id, variables))
        if which not in mirrors:
            self._check()
            with self._tf.init_scope():
                if not optimizer.built:
                    optimizer.build(variables)
                displacement = self._displacement(optimizer, variables)
                wrapped = self.factor_of(optimizer) is not None
                mirrors[which] = Mirror(self.runtime, optimizer, variables, wrapped, displacement)
            if displacement is not None and not self._tf.executing_eagerly():
                self._prediction.trace_once_more()
        return mirrors[which]

    def average_at(self, optimizers: Any) -> None:
        tf = self._tf

        @replaces("apply", optimizers)
        def apply(optimizer: Any, grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> Any:
            original = apply.__wrapped__
            if self.left_alone(optimizer):
                return original(optimizer, grads, trainable_variables)
            variables = list(optimizer._trainable_variables if trainable_variables is None else trainable_variables)
            mirror = self._mirror_of(optimizer, variables)
            displacement = mirror.displacement
            self._prediction.show_true_weights()
            dense = [
                tf.zeros_like(v) if g is None else tf.convert_to_tensor(g)
                for g, v in zip(grads, variables, strict=True)
            ]
            dtypes = [tf.bool, tf.bool, *(g.dtype for g in dense)]
            values = [tf.convert_to_tensor(v) for v in variables]
            there, late, *averages = tf.py_function(mirror.average, [*values, *dense], dtypes)
            for other in self._others(mirror):
                other.ahead.assign(False)
            if displacement is not None:
                displacement.ahead.assign(late)
            factor = self.factor_of(optimizer) or 1
            for i, gradient in enumerate(dense):
                averages[i].set_shape(gradient.shape)
                averages[i] = averages[i] if factor == 1 else averages[i] * factor

            given = [None if g is None else average for g, average in zip(grads, averages, strict=True)]

            def step() -> Any:
                before = displacement.weights() if displacement is not None else []
                count = tf.identity(optimizer.iterations)
                with self.within(optimizer):
                    original(optimizer, given, variables)
                if displacement is not None:
                    displacement.stepped(before, optimizer.iterations > count)
                return tf.constant(True)

            tf.cond(there, step, lambda: tf.constant(False))
            return None

    def _leave_out_xla(self, kind: Any) -> None:
        """Patch `Model.compile` so that XLA stays off, because code compiled by XLA cannot call back to Python."""
        signature = inspect.signature(kind.compile)

        @replaces("compile", kind)
        def compile(*args: Any, **kwargs: Any) -> Any:
            given = signature.bind(*args, **kwargs)
            if given.arguments.get("jit_compile") is True and not self.runtime.ranks.world.rank:
                text = "compile(jit_compile=True): XLA compiles no step that averages gradients, so it is left out"
                self.runtime.ranks.say(text)
            given.arguments["jit_compile"] = False
            return compile.__wrapped__(*given.args, **given.kwargs)

    def patch_fit(self, kind: Any) -> None:
        super().patch_fit(kind)

        @replaces("fit", kind)
        def fit(model: Any, *args: Any, **kwargs: Any) -> Any:
            if not self.runtime.script.explicit:
                self._check()
                if worker.streams is not None:
                    # whole batches are divided among ranks, so all ranks must shuffle data in the same order
                    worker.streams.enabled = False
            self._begun.append(False)
            try:
                return fit.__wrapped__(model, *args, **kwargs)
            except Exception:
                optimizer = getattr(model, "optimizer", None)
                for mirror in self._mirrors.get(optimizer, {}).values() if optimizer is not None else ():
                    if mirror.error is not None:
                        raise mirror.error from None
                raise
            finally:
                self._begun.pop()

    def _divide_epochs(self, kind: Any) -> None:
        """Patch the epoch iterator's `reset` so that each rank gets one of every `world_size` batches. Left-over
        batches are dropped, so that all ranks make the same number of steps."""
        ranks, rank, tf = self.runtime.ranks.world.world_size, self.runtime.ranks.world.rank, self._tf

        @replaces("reset", kind)
        def reset(iterator: Any) -> None:
            reset.__wrapped__(iterator)
            if self.runtime.script.explicit or not self._begun or self._begun[-1]:
                return
            self._begun[-1] = True  # iterators that `fit` resets after the first one read validation data
            known = iterator._num_batches
            self.divide_steps(iterator)
            is_tuple = isinstance(iterator._distributed_dataset.element_spec, tuple)

            def mine(*parts: Any) -> Any:
                return tf.data.Dataset.zip(parts if is_tuple else parts[0]).skip(rank).take(1)

            if known is not None and known < ranks:
                raise ConfigError(f"fit: an epoch of {known} batches cannot be divided among {ranks} workers")
            ordered = tf.data.Options()
            ordered.deterministic = True  # otherwise batches could be in another order on each rank
            data = iterator._distributed_dataset.with_options(ordered)
            iterator._distributed_dataset = data.window(ranks, drop_remainder=True).flat_map(mine)
            iterator._num_batches = None if known is None else known // ranks


def _permute_alike(kind: Any, tf: Any) -> None:
    """Patch `get_tf_dataset` so that arrays are shuffled again in each epoch, in the same order on all ranks."""

    @replaces("get_tf_dataset", kind)
    def get_tf_dataset(self: Any) -> Any:
        draws, usual = order.draw(), tf.random.shuffle

        def shuffle(indices: Any) -> Any:
            seed = tf.numpy_function(lambda: np.array([draws.getrandbits(31), 0]), [], tf.int64)
            return tf.random.experimental.stateless_shuffle(indices, tf.ensure_shape(seed, [2]))

        tf.random.shuffle = shuffle
        try:
            return get_tf_dataset.__wrapped__(self)
        finally:
            tf.random.shuffle = usual
