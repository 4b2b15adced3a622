"""Rollout router replay (R3): the experts the engine chose, recorded and replayed in the training forward."""
