"""Programs: every composed call as one list of steps over named arrays."""
