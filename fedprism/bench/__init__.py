"""Measurements of speed and memory, as `fedprism bench` makes them: every comparison side by side, in one run."""
