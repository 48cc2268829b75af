"""`accelerate launch -m train CONFIG` and `torchrun -m train CONFIG`."""

from specdec.cli import run_and_exit
from train.main import command

if __name__ == "__main__":
    run_and_exit(lambda: command(standalone_mode=False))
