"""Pure decisions: when to save, how failures come, what an interval is worth. Nothing of ours."""
