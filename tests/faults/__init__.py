"""Faults that are caused on purpose, and what must hold after them."""
