"""``python -m marscli`` is the ``mars`` command."""

from marscli.cli.app import main

if __name__ == "__main__":
    main()
