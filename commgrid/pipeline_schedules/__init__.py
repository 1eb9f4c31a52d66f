"""Pipeline schedules: what each stage computes in which order, and what it sends; without torch."""
