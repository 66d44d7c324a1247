"""Compares the speed of DADT with that of its peers at their best, and checks which targets are reached."""
