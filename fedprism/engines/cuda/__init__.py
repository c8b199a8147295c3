"""The engine for one GPU: many clients at once, whose training steps are captured once and replayed."""
