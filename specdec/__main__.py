"""`python -m specdec CONFIG`."""

from specdec.cli import run_and_exit
from specdec.main import command

if __name__ == "__main__":
    run_and_exit(lambda: command(standalone_mode=False))
