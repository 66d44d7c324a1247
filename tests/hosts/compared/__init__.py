"""The same faults in the same training under DADT, torchrun and torchft: `make faults-compared` (as root).

Four workers on two simulated hosts. For each system there is a script: DADT runs the plain one, the others one that was
changed for them, as their documentation has it.
"""
