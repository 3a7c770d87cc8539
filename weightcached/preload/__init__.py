"""`weightcached preload`: a daemon per device without systemd."""
