"""Who is at the other end of a connection, and is no process of the job."""

from __future__ import annotations

import gc
import os
import re
import socket
import subprocess
import sys

from dadt.comm.executors.strangers import strangers

CALLER = "import socket, sys; line = socket.create_connection(('127.0.0.1', int(sys.argv[1]))); sys.stdin.read()"


def test_a_process_of_another_job_is_named_and_one_of_this_job_is_not() -> None:
    gc.collect()  # tests before this one may have left connections of this process with itself
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        callers = [
            subprocess.Popen(
                [sys.executable, "-c", CALLER, port], stdin=subprocess.PIPE, env=os.environ | {"DADT_JOB": job}
            )
            for job in ("mine", "other")
        ]
        try:
            lines = [server.accept()[0] for _ in callers]
            found = strangers("mine", lambda address: False)
            assert re.fullmatch(rf"127\.0\.0\.1:\d+ \(process {callers[1].pid}, python.*\)", found), found
            assert strangers("", lambda address: False) == ""
        finally:
            for caller in callers:
                caller.communicate()
            for line in lines:
                line.close()
