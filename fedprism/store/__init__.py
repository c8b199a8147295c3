"""Client states in memory or on disk, and how a state is serialised."""
