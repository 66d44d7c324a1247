"""How fast DADT is beside its peers at their best, and which of the targets of its speed are reached."""
