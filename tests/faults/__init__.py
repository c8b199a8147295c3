"""What goes wrong outside of the program: every fault ends in a clear message, and nothing is lost."""
