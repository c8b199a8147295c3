"""What users' machines do to a run: each promise that still holds then has a test."""
