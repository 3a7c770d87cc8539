"""The two commands, `weightcached` and `weightcachectl`: one module a command."""
