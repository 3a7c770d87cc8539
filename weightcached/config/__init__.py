"""The manifest, and the ranks, rendezvous and drafts that follow from it."""
