"""State of a training that goes back to its last commit after an error, by Horovod's name."""

from dadt.frontends.horovod.torch.elastic.object_state import ObjectState as ObjectState
from dadt.frontends.horovod.torch.elastic.object_state import State as State
from dadt.frontends.horovod.torch.elastic.object_state import run as run
