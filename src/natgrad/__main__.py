"""`python -m natgrad` is the command `natgrad`."""

from natgrad.cli import run

if __name__ == "__main__":
    run()
