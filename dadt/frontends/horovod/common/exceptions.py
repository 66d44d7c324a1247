"""The errors that scripts for Horovod catch, by Horovod's name."""

from dadt.frontends.horovod.errors import HorovodInternalError as HorovodInternalError
from dadt.frontends.horovod.errors import HostsUpdatedInterrupt as HostsUpdatedInterrupt
