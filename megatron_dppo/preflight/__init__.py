"""What is known of a run before it starts: every rule that spans sections of a configuration, the model and the ranks
stands here once. `train` raises the first error, `doctor` and `plan` print all findings, in the same words."""
