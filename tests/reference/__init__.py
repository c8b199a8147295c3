"""Independent references of the methods in plain PyTorch; `common` says how they are used."""
