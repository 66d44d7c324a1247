"""Accelerate, and with it Hugging Face's Trainer, ignores plugins for FSDP on CPUs. Here it does not: a script imports
this before Accelerate, and is otherwise as for GPUs."""

from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType

_begin = AcceleratorState.__init__


def _begin_sharded(self, *args, fsdp_plugin=None, **kwargs):
    _begin(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
    if fsdp_plugin is not None and self.distributed_type is DistributedType.MULTI_CPU:
        self.distributed_type = PartialState._shared_state["distributed_type"] = DistributedType.FSDP
        self.fsdp_plugin = fsdp_plugin


AcceleratorState.__init__ = _begin_sharded
