"""`python -m megatron_adapter names`."""

import argparse

from megatron_adapter.names import as_text


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m megatron_adapter", description="Megatron-core's groups on a commgrid grid."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("names", help="which commgrid group each of Megatron's getters means")
    parser.parse_args()
    print(as_text())


if __name__ == "__main__":
    main()
