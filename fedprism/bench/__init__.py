"""Measurements of speed and memory for `fedprism bench`; all contenders of a comparison run side by side."""
