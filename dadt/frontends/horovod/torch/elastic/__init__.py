"""Horovod Elastic's `State` classes, sampler and `run`, for scripts that use them."""

from dadt.frontends.horovod.torch.elastic.object_state import ObjectState, State, run
from dadt.frontends.horovod.torch.elastic.sampler import ElasticSampler
from dadt.frontends.horovod.torch.elastic.state import TorchState

__all__ = ["ElasticSampler", "ObjectState", "State", "TorchState", "run"]
