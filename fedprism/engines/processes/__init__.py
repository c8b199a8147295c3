"""The engine for all cores of one machine: a pool of worker processes."""
