"""Horovod's API for torch: `import dadt.frontends.horovod.torch as hvd`."""

import sys

from dadt.frontends.horovod.errors import HorovodInternalError as HorovodInternalError
from dadt.frontends.horovod.torch import elastic as elastic
from dadt.frontends.horovod.torch.basics import ccl_built as ccl_built
from dadt.frontends.horovod.torch.basics import cuda_built as cuda_built
from dadt.frontends.horovod.torch.basics import ddl_built as ddl_built
from dadt.frontends.horovod.torch.basics import gloo_built as gloo_built
from dadt.frontends.horovod.torch.basics import gloo_enabled as gloo_enabled
from dadt.frontends.horovod.torch.basics import init as init
from dadt.frontends.horovod.torch.basics import mpi_built as mpi_built
from dadt.frontends.horovod.torch.basics import mpi_enabled as mpi_enabled
from dadt.frontends.horovod.torch.basics import mpi_threads_supported as mpi_threads_supported
from dadt.frontends.horovod.torch.basics import nccl_built as nccl_built
from dadt.frontends.horovod.torch.basics import rocm_built as rocm_built
from dadt.frontends.horovod.torch.basics import shutdown as shutdown
from dadt.frontends.horovod.torch.basics import start_timeline as start_timeline
from dadt.frontends.horovod.torch.basics import stop_timeline as stop_timeline
from dadt.frontends.horovod.torch.compression import Compression as Compression
from dadt.frontends.horovod.torch.gradients import allgather as allgather
from dadt.frontends.horovod.torch.gradients import allreduce as allreduce
from dadt.frontends.horovod.torch.gradients import allreduce_ as allreduce_
from dadt.frontends.horovod.torch.gradients import alltoall as alltoall
from dadt.frontends.horovod.torch.gradients import broadcast as broadcast
from dadt.frontends.horovod.torch.gradients import broadcast_ as broadcast_
from dadt.frontends.horovod.torch.gradients import grouped_allgather as grouped_allgather
from dadt.frontends.horovod.torch.gradients import grouped_allreduce as grouped_allreduce
from dadt.frontends.horovod.torch.gradients import grouped_allreduce_ as grouped_allreduce_
from dadt.frontends.horovod.torch.gradients import grouped_reducescatter as grouped_reducescatter
from dadt.frontends.horovod.torch.gradients import reducescatter as reducescatter
from dadt.frontends.horovod.torch.operations import allgather_async as allgather_async
from dadt.frontends.horovod.torch.operations import allreduce_async as allreduce_async
from dadt.frontends.horovod.torch.operations import allreduce_async_ as allreduce_async_
from dadt.frontends.horovod.torch.operations import alltoall_async as alltoall_async
from dadt.frontends.horovod.torch.operations import barrier as barrier
from dadt.frontends.horovod.torch.operations import broadcast_async as broadcast_async
from dadt.frontends.horovod.torch.operations import broadcast_async_ as broadcast_async_
from dadt.frontends.horovod.torch.operations import grouped_allgather_async as grouped_allgather_async
from dadt.frontends.horovod.torch.operations import grouped_allreduce_async as grouped_allreduce_async
from dadt.frontends.horovod.torch.operations import grouped_allreduce_async_ as grouped_allreduce_async_
from dadt.frontends.horovod.torch.operations import grouped_reducescatter_async as grouped_reducescatter_async
from dadt.frontends.horovod.torch.operations import join as join
from dadt.frontends.horovod.torch.operations import poll as poll
from dadt.frontends.horovod.torch.operations import reducescatter_async as reducescatter_async
from dadt.frontends.horovod.torch.operations import sparse_allreduce_async as sparse_allreduce_async
from dadt.frontends.horovod.torch.operations import synchronize as synchronize
from dadt.frontends.horovod.torch.optimizer import DistributedOptimizer as DistributedOptimizer
from dadt.frontends.horovod.torch.place import cross_rank as cross_rank
from dadt.frontends.horovod.torch.place import cross_size as cross_size
from dadt.frontends.horovod.torch.place import is_homogeneous as is_homogeneous
from dadt.frontends.horovod.torch.place import is_initialized as is_initialized
from dadt.frontends.horovod.torch.place import local_rank as local_rank
from dadt.frontends.horovod.torch.place import local_size as local_size
from dadt.frontends.horovod.torch.place import rank as rank
from dadt.frontends.horovod.torch.place import size as size
from dadt.frontends.horovod.torch.process_sets import ProcessSet as ProcessSet
from dadt.frontends.horovod.torch.process_sets import add_process_set as add_process_set
from dadt.frontends.horovod.torch.process_sets import global_process_set as global_process_set
from dadt.frontends.horovod.torch.process_sets import remove_process_set as remove_process_set
from dadt.frontends.horovod.torch.reduce_op import ReduceOp
from dadt.frontends.horovod.torch.state import allgather_object as allgather_object
from dadt.frontends.horovod.torch.state import broadcast_object as broadcast_object
from dadt.frontends.horovod.torch.state import broadcast_optimizer_state as broadcast_optimizer_state
from dadt.frontends.horovod.torch.state import broadcast_parameters as broadcast_parameters
from dadt.frontends.horovod.torch.sync_batch_norm import SyncBatchNorm as SyncBatchNorm

Average, Sum, Adasum, Min, Max, Product = ReduceOp
mpi_ops = functions = sys.modules[__name__]
"""Names of Horovod's modules, through which some scripts access the functions of this package."""
