"""`python -m msplit` is `msplit`."""

from msplit.cli.main import entry

if __name__ == "__main__":
    entry()
