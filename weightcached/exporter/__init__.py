"""One page of this node, Prometheus metrics and the health of the node."""
