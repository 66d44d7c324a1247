"""What `import dadt` offers, for type checkers: dadt/__init__.py imports each when it is used."""

from dadt.api.collectives import all_gather as all_gather
from dadt.api.collectives import all_gather_async as all_gather_async
from dadt.api.collectives import all_reduce as all_reduce
from dadt.api.collectives import all_reduce_ as all_reduce_
from dadt.api.collectives import all_reduce_async as all_reduce_async
from dadt.api.collectives import all_reduce_async_ as all_reduce_async_
from dadt.api.collectives import all_to_all as all_to_all
from dadt.api.collectives import all_to_all_async as all_to_all_async
from dadt.api.collectives import barrier as barrier
from dadt.api.collectives import broadcast as broadcast
from dadt.api.collectives import broadcast_ as broadcast_
from dadt.api.collectives import broadcast_async as broadcast_async
from dadt.api.collectives import broadcast_async_ as broadcast_async_
from dadt.api.collectives import gather as gather
from dadt.api.collectives import gather_async as gather_async
from dadt.api.collectives import grouped_all_reduce as grouped_all_reduce
from dadt.api.collectives import grouped_all_reduce_ as grouped_all_reduce_
from dadt.api.collectives import grouped_all_reduce_async as grouped_all_reduce_async
from dadt.api.collectives import join as join
from dadt.api.collectives import local_barrier as local_barrier
from dadt.api.collectives import poll as poll
from dadt.api.collectives import reduce as reduce
from dadt.api.collectives import reduce_async as reduce_async
from dadt.api.collectives import reduce_scatter as reduce_scatter
from dadt.api.collectives import reduce_scatter_async as reduce_scatter_async
from dadt.api.collectives import scatter as scatter
from dadt.api.collectives import scatter_async as scatter_async
from dadt.api.collectives import synchronize as synchronize
from dadt.api.lifecycle import add_process_set as add_process_set
from dadt.api.lifecycle import cross_rank as cross_rank
from dadt.api.lifecycle import cross_size as cross_size
from dadt.api.lifecycle import init as init
from dadt.api.lifecycle import initialized as initialized
from dadt.api.lifecycle import local_rank as local_rank
from dadt.api.lifecycle import local_size as local_size
from dadt.api.lifecycle import rank as rank
from dadt.api.lifecycle import remove_process_set as remove_process_set
from dadt.api.lifecycle import shutdown as shutdown
from dadt.api.lifecycle import size as size
from dadt.api.messages import irecv as irecv
from dadt.api.messages import isend as isend
from dadt.api.messages import recv as recv
from dadt.api.messages import send as send
from dadt.api.optimizer import DistributedOptimizer as DistributedOptimizer
from dadt.api.run import run as run
from dadt.api.sampler import DistributedSampler as DistributedSampler
from dadt.api.sparse import coo_all_reduce as coo_all_reduce
from dadt.api.sparse import coo_all_reduce_async as coo_all_reduce_async
from dadt.api.state import allgather_object as allgather_object
from dadt.api.state import broadcast_object as broadcast_object
from dadt.api.state import broadcast_optimizer_state as broadcast_optimizer_state
from dadt.api.state import broadcast_parameters as broadcast_parameters
from dadt.comm.collectives.process_set import Handle as Handle
from dadt.comm.collectives.process_set import ProcessSet as ProcessSet
from dadt.config import Config as Config
from dadt.errors import *  # noqa: F403
from dadt.world import World as World

__version__: str

def __dir__() -> list[str]: ...
