"""Module of Horovod's API for training state that returns to its last commit after an error."""

from dadt.frontends.horovod.torch.elastic.object_state import ObjectState as ObjectState
from dadt.frontends.horovod.torch.elastic.object_state import State as State
from dadt.frontends.horovod.torch.elastic.object_state import run as run
