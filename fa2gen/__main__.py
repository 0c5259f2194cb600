"""``python -m fa2gen``: the command where its folder is not on PATH."""

from .cli import main

if __name__ == "__main__":
    main(prog_name="fa2gen")
