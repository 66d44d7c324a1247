"""States, samplers and `run` for scripts written for Horovod Elastic."""

from dadt.frontends.horovod.common.elastic import ObjectState as ObjectState
from dadt.frontends.horovod.common.elastic import State as State
from dadt.frontends.horovod.common.elastic import run as run
from dadt.frontends.horovod.torch.elastic.sampler import ElasticSampler as ElasticSampler
from dadt.frontends.horovod.torch.elastic.state import TorchState as TorchState

__all__ = ["ElasticSampler", "ObjectState", "State", "TorchState", "run"]
