"""`python -m weightscope` is the `weightscope` command."""

from weightscope.cli import main

if __name__ == "__main__":
    main()
