"""`python -m distill CONFIG`."""

from distill.main import command

if __name__ == "__main__":
    command()
