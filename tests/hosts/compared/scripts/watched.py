"""Each step that a worker has taken, and its last weights, for who watches. The same in all scripts."""

import hashlib
import os
import socket

_line = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
_line.connect(os.environ["TRACE_SOCKET"])


def _rank():
    names = ("REPLICA_GROUP_ID", "DADT_RANK", "RANK")
    return next(os.environ[name] for name in names if name in os.environ)


def step(number):
    _line.send(f"{_rank()} {number}".encode())


def end(number, model):
    tensors = getattr(model, "module", model).state_dict().values()
    digest = hashlib.sha256(b"".join(tensor.numpy().tobytes() for tensor in tensors)).hexdigest()
    _line.send(f"{_rank()} {number} {digest}".encode())
