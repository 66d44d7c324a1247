"""Horovod Elastic's `State` classes, sampler and `run`, for scripts that use them."""

from dadt.frontends.horovod.torch.elastic.object_state import ObjectState as ObjectState
from dadt.frontends.horovod.torch.elastic.object_state import State as State
from dadt.frontends.horovod.torch.elastic.object_state import run as run
from dadt.frontends.horovod.torch.elastic.sampler import ElasticSampler as ElasticSampler
from dadt.frontends.horovod.torch.elastic.state import TorchState as TorchState

__all__ = ["ElasticSampler", "ObjectState", "State", "TorchState", "run"]
