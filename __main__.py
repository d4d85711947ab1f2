"""The command `distrain`, which is `python -m distrain` too."""


def main() -> None:
    """Run the command line and exit with its status: 130 at a Ctrl-C, though it comes while this is imported."""
    try:
        from .cli.app import main as run

        run()
    except KeyboardInterrupt:
        raise SystemExit(130) from None


if __name__ == "__main__":
    main()
