"""`python -m weightcached` is `weightcached`."""

from weightcached.cli import main

main()
