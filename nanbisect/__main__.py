"""`python -m nanbisect` is `nanbisect`."""

from nanbisect.cli import main

main()
