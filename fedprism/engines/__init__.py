"""Where a federation runs: one round loop, one `client_round`, and the engines that call it."""
