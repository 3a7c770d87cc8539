"""`python -m weightcached.loader`: see main.py."""

from weightcached.loader.main import main

if __name__ == "__main__":
    main()
