"""Pages and plots: what a run did, read from its directory."""
