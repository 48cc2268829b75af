"""`python -m specdec CONFIG`."""

from specdec.main import command

if __name__ == "__main__":
    command()
