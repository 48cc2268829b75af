"""`python -m eval CONFIG`."""

from eval.main import command

if __name__ == "__main__":
    command()
