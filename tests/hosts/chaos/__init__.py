"""Faults that befall jobs with --min-np, drawn by seed: `make chaos` (as root).

Each job has four workers on one or two simulated hosts, joined by SSH. A fault strikes it in the midst of a step; what
follows is promised before, by its kind. The same seed draws the same fault, training and moment.
"""
