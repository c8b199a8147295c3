"""What one round is, whatever it runs on: start with `loop.py`, then `client.py`."""
