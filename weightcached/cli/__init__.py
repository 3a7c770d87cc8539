"""`weightcached` and `weightcachectl`: one module for each command."""
