"""`python -m holdfast`, which is also how torchrun starts it."""

from holdfast.cli import main

if __name__ == "__main__":
    main()
