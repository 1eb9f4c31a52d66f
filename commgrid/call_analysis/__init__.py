"""What recorded or planned calls mean: who waits for whom, whether all can end; without torch."""
