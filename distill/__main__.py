"""`python -m distill CONFIG`, and `accelerate launch -m distill CONFIG`."""

from distill.main import command
from specdec.cli import run_and_exit

if __name__ == "__main__":
    run_and_exit(lambda: command(standalone_mode=False))
