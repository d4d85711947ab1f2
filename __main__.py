"""The command `distrain`, also run as `python -m distrain`."""


def main() -> None:
    """Run the command line and exit with its status; a Ctrl-C while the command line is being imported exits with 130 too."""
    try:
        from .cli.app import main as run

        run()
    except KeyboardInterrupt:
        raise SystemExit(130) from None


if __name__ == "__main__":
    main()
