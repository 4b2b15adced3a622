"""What is wrong with a machine, a cluster or a configuration, before a single GPU-hour is spent."""
