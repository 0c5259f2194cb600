"""Runs fa2gen from a checkout: ``python cli.py tune --headdim 128 --gpu a100``."""

from fa2gen.cli import main

if __name__ == "__main__":
    main(prog_name="fa2gen")
