"""Module of Horovod's API with the exceptions that scripts written for Horovod catch."""

from dadt.frontends.horovod.errors import HorovodInternalError as HorovodInternalError
from dadt.frontends.horovod.errors import HostsUpdatedInterrupt as HostsUpdatedInterrupt
