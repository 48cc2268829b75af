"""`accelerate launch -m train CONFIG` and `torchrun -m train CONFIG`."""

from train.main import command

if __name__ == "__main__":
    command()
