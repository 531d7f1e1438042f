"""`python -m localq` is the `localq` command."""

from localq.cli import main

if __name__ == "__main__":
    main()
