"""`python -m weightcached` is `weightcached`."""

from weightcached.cli.weightcached import main

main()
