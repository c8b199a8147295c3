"""`python -m fedprism`: the command line."""

from fedprism.cli import main

if __name__ == "__main__":
    main()
