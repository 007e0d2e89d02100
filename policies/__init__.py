"""Pure decisions: when to save, how failures come, what an interval is worth. numpy and scipy, nothing of ours."""
